"""What TLS and the door of a service cost: a yard with its certificates, beside one with security.tls false.

    make bench BENCH=security            (with options: ARGS="--pairs 3")

`tls_push_pull`: 64 MiB pushed and pulled over streams (TCP on loopback), in rounds a second. `tls_latency`: steps of
4 KiB over streams, by their p50. `tls_same_host`: the same steps over the local socket, which has nothing to encrypt.
Each is the figure with TLS over the one without, so 1 is no cost. `authorisation_us`: what the door of a service takes
for one call, in microseconds; a stream is looked at once, when it opens. The numbers are checked. `encrypted_write` and
`encrypted_read`: a file of 256 MiB in a folder, in bytes a second, with storage.key_file over without.

`under_attack`: what training keeps of its steps a second while a yard is attacked. Two workers train a small model,
asynchronously, over two servers. One process attacks both servers and the coordinator (harness.attacks). Its steps are
measured once the attack stands, against those right before it and right after it. The figure is the median of these
pairs, of the attack with the least. The attacker gives way to all others (nice 19) and its rates are bounded. It shares
the cores with those that it attacks. So what it used of the processor is reported, and `under_attack_elsewhere`: the
steps under the attack over those beside the same process when it uses as much of the processor and attacks nobody.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from harness.attacks.attacks import ATTACKS
from harness.measuring.pairs import Figures, column, measure_pairs, ratios, spread
from harness.measuring.report import Panel, conclude, options_of, report
from harness.processes.programs import Programs
from harness.processes.sides import Side, shardyard_side
from shardyard.domain.limits import MIB
from shardyard.security.authority import Authority, make_credentials
from shardyard.security.credentials import write_credentials
from shardyard.security.door import Door
from shardyard.security.identity import Role
from shardyard.security.local import AUTHORITY
from shardyard.storage.encryption import EncryptedStorage, StorageKeys
from shardyard.storage.storage import LocalStorage, Storage
from shardyard.wire import methods

LARGE = ("--tensors", "16", "--elements", str(1 << 20))
SMALL = ("--tensors", "1", "--elements", "1024")
SIDES = {"TLS": True, "without TLS": False}
WARM_ROUNDS = 6
WARM_S = 1.0
DOOR_CALLS = 20_000
FILE_BYTES = 256 * MIB
SETTLE_S = 5.0
"""How long an attack takes to begin, and its traces to go."""


def measure_rounds(side: Side, rounds: int) -> Figures:
    measured = side.measure("measure", rounds=rounds)
    side.ask("check")
    cpu_s = measured.total("cpu_s") + measured.service_cpu_s
    return {"rounds_per_s": rounds / measured.total("exchange_s"), "cpu_s_per_round": cpu_s / rounds}


def measure_steps(side: Side, seconds: float) -> Figures:
    (answer,) = side.ask("measure", seconds=seconds)
    side.ask("check")
    p50, p99 = np.percentile(np.array(answer["each_s"]) * 1e6, [50, 99])
    return {"p50_us": float(p50), "p99_us": float(p99)}


def run(
    shape: tuple[str, ...], same_host: str, measure: Callable[[Side], Figures], pairs: int
) -> dict[str, list[Figures]]:
    with ExitStack() as stack:
        measured: dict[str, Callable[[], Figures]] = {}
        for name, tls in SIDES.items():
            settings = {"worker.same_host": same_host}
            side = stack.enter_context(
                shardyard_side("shardyard.rounds", *shape, workers=1, settings=settings, tls=tls)
            )
            measure(side)
            measured[name] = partial(measure, side)
        return measure_pairs(measured, pairs)


def measure_attacks(names: Iterable[str], repeats: int, seconds: float) -> dict[str, list[Figures]]:
    """For each of these: steps a second without it and with it, and the attacker's use of the processor in cores."""
    settings = {"job.consistency.mode": "async", "worker.same_host": "never"}
    found: dict[str, list[Figures]] = {}
    with (
        shardyard_side("shardyard.training", "--task", "mlp", workers=2, servers=2, settings=settings) as side,
        tempfile.TemporaryDirectory() as folder,
        Programs() as programs,
    ):
        stolen = Path(folder)
        write_credentials(stolen, make_credentials(Authority(side.identities / AUTHORITY), Role.WORKER, "eve", 3_600))
        ports = ["--servers", *side.servers, "--coordinator", side.coordinator]
        attacker = programs.start("shardyard.attacker", "--identity", str(stolen), *ports)
        programs.await_ready()

        def train() -> float:
            return sum(answer["steps"] / answer["seconds"] for answer in side.ask("train", seconds=seconds))

        def attacked(name: str) -> list[Figures]:
            """Two pairs: before the attack and under it, and under it and after it."""
            before = train()
            attacker.ask("attack", name=name)
            time.sleep(SETTLE_S)
            under = [train(), train()]
            used = attacker.ask("rest")
            time.sleep(SETTLE_S)
            alone, cores = [before, train()], used["cpu_s"] / used["seconds"]
            attacker.ask("compute", cores=cores)
            beside = [train(), train()]
            attacker.ask("rest")
            return [
                {"alone_steps_per_s": a, "steps_per_s": b, "computing_steps_per_s": c, "attacker_cores": cores}
                for a, b, c in zip(alone, under, beside, strict=True)
            ]

        train()
        for name in names:
            found[name] = [figures for _ in range(repeats) for figures in attacked(name)]
            cores = spread(column(found[name], "attacker_cores"))
            kept, elsewhere = (spread(each) for each in kept_of(found[name]))
            print(f"kept under {name}: {kept}; elsewhere {elsewhere}; the attacker used {cores} cores", flush=True)
    return found


def kept_of(measured: list[Figures]) -> tuple[list[float], list[float]]:
    """What was kept of the steps alone, and of those beside a process that uses as much of the processor."""
    alone, computing = ("alone_steps_per_s", "computing_steps_per_s")
    kept = ([each["steps_per_s"] / each[over] for each in measured] for over in (alone, computing))
    return next(kept), next(kept)


def measure_door(repeats: int) -> list[float]:
    """Microseconds of a look at a caller that is known, as the second call of a connection is."""
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority(Path(folder))
        pem = make_credentials(authority, Role.WORKER, "w", 3_600)
    names = [f"spiffe://{authority.yard}/worker/w".encode(), b"worker.shardyard"]
    connection = {"x509_pem_cert": [pem.certificate], "x509_subject_alternative_name": names}
    door, found = Door(), []
    for _ in range(repeats):
        begun = time.perf_counter()
        for _ in range(DOOR_CALLS):
            door.admit(methods.PUSH_PULL, connection)
        found.append((time.perf_counter() - begun) / DOOR_CALLS * 1e6)
    return found


def measure_file(storage: Storage) -> Figures:
    """A file is written in pieces of 1 MiB, with fsync, and read from the page cache."""
    pieces = [np.random.default_rng(number).bytes(MIB) for number in range(FILE_BYTES // MIB)]
    begun = time.perf_counter()
    storage.write("file", pieces)
    written = time.perf_counter()
    found = list(storage.read_pieces("file", 0, FILE_BYTES))
    read = time.perf_counter()
    assert b"".join(found) == b"".join(pieces)
    storage.delete_file("file")
    mib = FILE_BYTES / MIB
    return {"written_mib_per_s": mib / (written - begun), "read_mib_per_s": mib / (read - written)}


def measure_files(pairs: int) -> dict[str, list[Figures]]:
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "key"
        key.write_text("ab" * 32)
        plain = LocalStorage(Path(folder))
        sides = {"encrypted": EncryptedStorage(plain, StorageKeys(key)), "plain": plain}
        return measure_pairs({name: partial(measure_file, storage) for name, storage in sides.items()}, pairs)


def main() -> None:
    parser = options_of(__doc__, pairs=9)
    parser.add_argument("--rounds", type=int, default=20, help="rounds of 64 MiB in a measurement (20)")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a measurement of small steps (2)")
    parser.add_argument("--repeats", type=int, default=1, help="how often each attack is measured, in two pairs (1)")
    parser.add_argument(
        "--attacks", nargs="*", choices=ATTACKS, metavar="NAME", help="measure these attacks, and no more (all)"
    )
    options = parser.parse_args()
    attacks = measure_attacks(options.attacks or ATTACKS, options.repeats, options.seconds)
    kept, elsewhere = zip(*map(kept_of, attacks.values()), strict=True)
    under_attack = {
        "under_attack": min(kept, key=lambda values: spread(values).median),
        "under_attack_elsewhere": min(elsewhere, key=lambda values: spread(values).median),
    }
    if options.attacks is not None:
        conclude("security", attacks, under_attack)
        return
    large = run(LARGE, "never", partial(measure_rounds, rounds=options.rounds), options.pairs)
    small = run(SMALL, "never", partial(measure_steps, seconds=options.seconds), options.pairs)
    files = measure_files(options.pairs)
    local = run(SMALL, "auto", partial(measure_steps, seconds=options.seconds), options.pairs)
    found = {
        "tls_push_pull": ratios(large["TLS"], large["without TLS"], "rounds_per_s"),
        "tls_push_pull_cpu": ratios(large["TLS"], large["without TLS"], "cpu_s_per_round"),
        "tls_latency": ratios(small["without TLS"], small["TLS"], "p50_us"),
        "tls_same_host": ratios(local["without TLS"], local["TLS"], "p50_us"),
        "authorisation_us": measure_door(options.pairs),
        "encrypted_write": ratios(files["encrypted"], files["plain"], "written_mib_per_s"),
        "encrypted_read": ratios(files["encrypted"], files["plain"], "read_mib_per_s"),
        **under_attack,
    }
    raw = {
        f"{what}, {name}": results
        for what, measured in (
            ("64 MiB", large),
            ("4 KiB", small),
            ("4 KiB, same host", local),
            ("file of 256 MiB", files),
        )
        for name, results in measured.items()
    }
    for name, results in raw.items():
        print(f"{name}: {', '.join(f'{key} {spread(column(results, key))}' for key in results[0])}", flush=True)
    panels = [
        Panel("64 MiB pushed and pulled", "rounds/s", bars={n: column(r, "rounds_per_s") for n, r in large.items()}),
        Panel("4 KiB over streams, p50", "us", bars={n: column(r, "p50_us") for n, r in small.items()}),
        Panel("4 KiB on the same host, p50", "us", bars={n: column(r, "p50_us") for n, r in local.items()}),
    ]
    report("security", raw | attacks, found, panels=panels, folder=options.figures)


if __name__ == "__main__":
    main()
