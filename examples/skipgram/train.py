"""Word vectors (skip-gram, negative sampling) of the identifiers in the sources of Python's standard library.

python examples/skipgram/train.py                                              alone, in this process
shardyard run -c configs/tables.yaml examples/skipgram/train.py                in a yard of its own, two workers
SHARDYARD_COORDINATOR=127.0.0.1:7070 python examples/skipgram/train.py         in a running yard
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from words import Batch, Counts, Passages, SkipGrams, hashed, sources, words_of

import shardyard as sy

TELL_EVERY_S = 5.0
ASKED = ["self", "True", "int", "read", "socket", "async", "encode", "threading"]


class SkipGram(torch.nn.Module):
    """A vector of each word, and one of it as a neighbour of others. Neither table has a size."""

    def __init__(self, dim: int, rate: float) -> None:
        super().__init__()
        optimizer = sy.tables.Adagrad(lr=rate)
        contexts = sy.tables.Table(dim, name="contexts", optimizer=optimizer, initial=sy.tables.zeros())
        self.words = sy.Embedding(dim, table="words", optimizer=optimizer)
        self.lookup = sy.EmbeddingCollection(
            {"word": self.words, "near": sy.Embedding(dim, table=contexts), "drawn": sy.Embedding(dim, table=contexts)}
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        """The loss, by word: how likely the words nearby are held to be drawn, and the drawn ones to be nearby."""
        rows = self.lookup({"word": batch.words, "near": batch.near, "drawn": batch.drawn})
        near = (rows["near"] * rows["word"]).sum(dim=1)
        drawn = (rows["drawn"] * rows["word"].unsqueeze(1)).sum(dim=2)
        return -(F.logsigmoid(near).sum() + F.logsigmoid(-drawn).sum()) / max(1, len(near))

    def vectors(self, ids: list[int]) -> torch.Tensor:
        """Shape (n, dim), of length 1."""
        with torch.no_grad():
            return F.normalize(self.words(torch.tensor(ids, dtype=torch.int64)), dim=1)


def nearest(model: SkipGram, word: str, counts: Counts, vocabulary: list[int], count: int) -> list[tuple[str, float]]:
    """The words of the vocabulary whose vectors have the smallest angle with the word's, and its cosine."""
    cosines = model.vectors(vocabulary) @ model.vectors([hashed(word)])[0]
    best = torch.argsort(cosines, descending=True).tolist()
    found = [(counts.words[vocabulary[place]], cosines[place].item()) for place in best[: count + 1]]
    return [each for each in found if each[0] != word][:count]


def save(path: Path, model: SkipGram, counts: Counts, vocabulary: list[int]) -> None:
    """In the text format of word2vec, which many programs read."""
    with path.open("w", encoding="utf-8") as file:
        file.write(f"{len(vocabulary)} {model.words.dim}\n")
        for id_, vector in zip(vocabulary, model.vectors(vocabulary).tolist(), strict=True):
            file.write(" ".join([counts.words[id_], *(f"{number:.6f}" for number in vector)]) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--coordinator", help="HOST:PORT of a running yard")
    parser.add_argument("--config", help="a YAML file, see docs/reference/configuration.md")
    parser.add_argument("--job", default=os.environ.get("SHARDYARD_JOB", "skipgram"), help="the job's name")
    parser.add_argument("--seed", type=int, help="the job's seed")
    parser.add_argument(
        "--files", type=Path, nargs="+", help="texts to read in place of the sources of the standard library"
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16, help="passages of 2 KiB")
    parser.add_argument("--dim", type=int, default=64, help="of the vectors")
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate of the rows, for Adagrad")
    parser.add_argument("--window", type=int, default=5, help="how far away a word may be to be nearby")
    parser.add_argument("--negatives", type=int, default=5, help="words drawn for each pair")
    parser.add_argument("--share", type=float, default=1e-3, help="words more frequent than that are thinned out")
    parser.add_argument("--ask", nargs="+", default=ASKED, metavar="WORD", help="words whose neighbours are printed")
    parser.add_argument("--neighbours", type=int, default=6, help="how many of them")
    parser.add_argument(
        "--vocabulary", type=int, default=5_000, help="they are among so many of the most frequent words"
    )
    parser.add_argument("--save", type=Path, help="a file for the vectors of these words, in word2vec's text format")
    return parser.parse_args()


def main() -> None:
    options = parse()
    settings = {} if options.seed is None else {"job.seed": options.seed}
    passages = Passages(options.files or sources())
    made = SkipGrams(options.window, options.negatives, options.share)
    with sy.connect(options.coordinator, config=options.config, job=options.job, settings=settings) as job:
        model = SkipGram(options.dim, options.rate).to(job.device)
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=options.rate))
        told, read = time.monotonic(), 0
        for batch in job.batches(passages, batch_size=options.batch_size, epochs=options.epochs, collate_fn=made):
            loss = model(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            job.log(loss=loss)
            read += batch.read
            if (passed := time.monotonic() - told) >= TELL_EVERY_S:
                print(f"step {job.step:,}: loss {loss.item():.3f}, {read / passed:,.0f} words/s", flush=True)
                told, read = time.monotonic(), 0

        if job.chief:
            counts = Counts()
            for passage in passages:
                counts.add(words_of(passage))
            vocabulary = counts.most(options.vocabulary)
            print(f"{counts.total:,} words in {len(passages):,} passages, {len(model.words.table):,} vectors")
            for word in options.ask:
                if hashed(word) not in counts.words:
                    print(f"{word:>12}:  was not read")
                    continue
                found = nearest(model, word, counts, vocabulary, options.neighbours)
                print(f"{word:>12}:  " + "  ".join(f"{other} {cosine:.2f}" for other, cosine in found), flush=True)
            if options.save:
                save(options.save, model, counts, vocabulary)


if __name__ == "__main__":
    main()
