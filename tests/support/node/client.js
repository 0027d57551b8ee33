// A worker in another language, from the protos alone: @grpc/grpc-js and @grpc/proto-loader, none of our code.
//
//   node client.js PROTOS COORDINATOR JOB [FOLDER]
//
// FOLDER has the certificate of a worker: tls.crt, tls.key, ca.crt. Without it, the client connects with TLS and shows
// none.
//
// Starts an asynchronous job, gives the servers first values, pushes and pulls in every way that the protocol knows, and
// holds each value that it pulls against its own arithmetic. What it does is told in lines of JSON on stdout; where a line
// says "wait", it goes on when a line comes on stdin. Any difference ends it with exit code 1.

'use strict';

const assert = require('assert');
const crypto = require('crypto');
const fs = require('fs');
const path = require('path');
const readline = require('readline');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const [protos, coordinatorAddress, jobName, folder] = process.argv.slice(2);
const files = ['coordinator', 'parameter_server'].map((name) => `shardyard/wire/v1/${name}.proto`);
const definition = loader.loadSync(files, {
  includeDirs: [path.resolve(protos)],
  keepCase: true,
  longs: String,
  enums: String,
  defaults: true,
  oneofs: true,
});
const { Coordinator, ParameterServer } = grpc.loadPackageDefinition(definition).shardyard.wire.v1;

const MESSAGE_BYTES_MAX = 16 * 1024 * 1024;
const FRAME_BYTES = 1024 * 1024;
const ALIGN = 64;
const DEADLINE_MS = 20000;
const OPTIONS = {
  'grpc.enable_retries': 0,
  'grpc.max_send_message_length': MESSAGE_BYTES_MAX,
  'grpc.max_receive_message_length': MESSAGE_BYTES_MAX,
};

// A peer's certificate is for its role, whatever its address.
function shown() {
  if (!folder) {
    return grpc.credentials.createSsl(null, null, null, { rejectUnauthorized: false });
  }
  const read = (name) => fs.readFileSync(path.join(folder, name));
  return grpc.credentials.createSsl(read('ca.crt'), read('tls.key'), read('tls.crt'));
}

function optionsFor(role) {
  const name = `${role}.shardyard`;
  return { ...OPTIONS, 'grpc.ssl_target_name_override': name, 'grpc.default_authority': name };
}

// What calls show to servers: the pass, once the job is joined.
const metadata = new grpc.Metadata();
const RATE = 0.5;
const GROUPS = [{ values: [RATE, 0, 0, 0, 0, 0] }];
// "big" goes over several frames, "small" is one of a few bytes
const VARIABLES = [
  { name: 'big', dtype: 'DTYPE_FLOAT32', shape: [1000, 900], kind: 'VARIABLE_KIND_PARAMETER' },
  { name: 'small', dtype: 'DTYPE_FLOAT32', shape: [5], kind: 'VARIABLE_KIND_PARAMETER' },
  { name: 'double', dtype: 'DTYPE_FLOAT64', shape: [3], kind: 'VARIABLE_KIND_PARAMETER' },
];
const ARRAYS = { DTYPE_FLOAT32: Float32Array, DTYPE_FLOAT64: Float64Array };

function elements(variable) {
  return variable.shape.reduce((product, size) => product * Number(size), 1);
}

// Numbers that float32 holds exactly, as it does all their sums here: what is pulled can be compared bit for bit.
function firstValue(variable, index) {
  return ((index * 3 + variable) % 257) / 4;
}

function gradientOf(variable, index, round) {
  return ((index * 7 + round * 13 + variable) % 101 - 50) / 8;
}

function makeArrays(fill) {
  return VARIABLES.map((spec, variable) => {
    const found = new ARRAYS[spec.dtype](elements(spec));
    for (let index = 0; index < found.length; index += 1) found[index] = fill(variable, index);
    return found;
  });
}

function tell(what, more = {}) {
  process.stdout.write(`${JSON.stringify({ what, ...more })}\n`);
}

const input = readline.createInterface({ input: process.stdin })[Symbol.asyncIterator]();
async function wait(what, more = {}) {
  tell(what, { wait: true, ...more });
  const { done } = await input.next();
  assert(!done, 'the test has gone');
}

function call(client, method, request) {
  return new Promise((resolve, reject) => {
    client[method](request, metadata, { deadline: Date.now() + DEADLINE_MS }, (error, reply) => {
      if (error) reject(error);
      else resolve(reply);
    });
  });
}

async function untilReady(ask) {
  for (;;) {
    try {
      return await ask();
    } catch (error) {
      if (!codeOf(error).includes('NotReady')) throw error;
      await new Promise((resolve) => { setTimeout(resolve, 50); });
    }
  }
}

// The ErrorDetail in the trailers: its field 1, the code, comes first.
function codeOf(error) {
  const [detail] = (error.metadata && error.metadata.get('shardyard-error-bin')) || [];
  if (!detail) return '';
  assert.strictEqual(detail[0], 0x0a);
  return detail.subarray(2, 2 + detail[1]).toString();
}

// Answers that are alike, written out: one for each partition asked for, in that order.
function writtenOut(parts, partitions) {
  const found = [];
  for (const part of parts) {
    assert.strictEqual(part.partition, partitions[found.length]);
    for (let more = 0; more <= part.alike; more += 1) {
      found.push({ ...part, partition: partitions[found.length], alike: 0 });
    }
  }
  assert.strictEqual(found.length, partitions.length);
  return found;
}

// ---- payloads

class Server {
  constructor(address, incarnation, partitions, layout) {
    this.client = new ParameterServer(address, shown(), optionsFor('server'));
    this.incarnation = incarnation;
    this.partitions = partitions;
    this.layouts = partitions.map((number) => layout.partitions[number]);
    this.nbytes = this.layouts.reduce((sum, part) => sum + Number(part.payload_bytes), 0);
  }

  // Calls back with (variable, offset, length, byte of this server's payload) for each block.
  eachBlock(present, use) {
    let begin = 0;
    for (const part of this.layouts) {
      for (const block of part.blocks) {
        if (!present(block.variable)) continue;
        const length = Number(block.length);
        use(block.variable, Number(block.offset), length, begin);
        begin += Math.ceil((length * itemBytes(block.variable)) / ALIGN) * ALIGN;
      }
    }
    return begin;
  }

  // The parts and the payload of a push that carries only the variables that are present.
  cut(arrays, present = () => true) {
    const parts = this.layouts.map((part) => {
      const absent = [...part.blocks.keys()].filter((index) => !present(part.blocks[index].variable));
      const kept = part.blocks.filter((block) => present(block.variable));
      const nbytes = kept.reduce(
        (sum, block) => sum + Math.ceil((Number(block.length) * itemBytes(block.variable)) / ALIGN) * ALIGN, 0);
      return { partition: part.partition, payload_bytes: nbytes, absent_blocks: nbytes ? absent : [] };
    });
    const payload = Buffer.alloc(parts.reduce((sum, part) => sum + part.payload_bytes, 0));
    this.eachBlock(present, (variable, offset, length, begin) => {
      const values = arrays[variable].subarray(offset, offset + length);
      Buffer.from(values.buffer, values.byteOffset, values.byteLength).copy(payload, begin);
    });
    return { parts, payload };
  }

  // Puts a pulled payload into arrays.
  place(payload, arrays) {
    assert.strictEqual(payload.length, this.nbytes);
    this.eachBlock(() => true, (variable, offset, length, begin) => {
      const into = arrays[variable].subarray(offset, offset + length);
      payload.copy(Buffer.from(into.buffer, into.byteOffset, into.byteLength), 0, begin, begin + into.byteLength);
    });
  }
}

function itemBytes(variable) {
  return ARRAYS[VARIABLES[variable].dtype].BYTES_PER_ELEMENT;
}

function writeFrames(stream, header, payload) {
  let offset = 0;
  do {
    const data = payload.subarray(offset, offset + FRAME_BYTES);
    stream.write(offset === 0 ? { header, data } : { offset, data });
    offset += data.length;
  } while (offset < payload.length);
  return Math.max(1, Math.ceil(payload.length / FRAME_BYTES));
}

// ---- exchanges

class Exchanges {
  constructor(server) {
    this.server = server;
    this.stream = server.client.PushPull(metadata, { deadline: Date.now() + DEADLINE_MS });
    this.answers = this.stream[Symbol.asyncIterator]();
  }

  // Sends a push, and takes the answer: {header, payload, frames}.
  async run(header, payload, expected = header.pull ? this.server.nbytes : 0) {
    writeFrames(this.stream, header, payload);
    const pieces = [];
    let [filled, first] = [0, null];
    do {
      const { value, done } = await this.answers.next();
      assert(!done, 'the server has ended the stream');
      first = first || value.header;
      if (value.data.length) assert.strictEqual(Number(value.offset), filled);
      pieces.push(value.data);
      filled += value.data.length;
    } while (filled < expected && !first.not_yet);
    return { header: first, payload: Buffer.concat(pieces), frames: pieces.length };
  }

  // Half-closes the stream; the server ends it in good order.
  async end() {
    this.stream.end();
    const { done } = await this.answers.next();
    assert(done);
  }
}

// ---- the worker

class Worker {
  constructor() {
    this.yard = new Coordinator(coordinatorAddress, shown(), optionsFor('coordinator'));
    this.round = 0;
    this.values = makeArrays(firstValue);
  }

  async join() {
    const registered = await call(this.yard, 'Register', {
      role: 'ROLE_WORKER', protocol: 1, release: 'node', host: 'node', pid: process.pid,
    });
    this.incarnation = registered.incarnation;
    this.caller = { incarnation: this.incarnation };
    this.heart = setInterval(() => {
      call(this.yard, 'Heartbeat', { caller: this.caller, step: this.round }).catch((error) => {
        process.stderr.write(`heartbeat: ${error}\n`);
        process.exit(1);
      });
    }, registered.heartbeat_ms);
    const settings = { name: jobName, partitions: 5, consistency: { mode: 'async' } };
    const joined = await call(this.yard, 'JoinJob', {
      caller: this.caller, name: jobName, settings_json: JSON.stringify(settings),
    });
    assert(joined.started);
    this.caller = { incarnation: this.incarnation, job: joined.job };
    metadata.set('shardyard-pass-bin', joined.job_pass);
  }

  async register() {
    const placed = await untilReady(() => call(this.yard, 'RegisterVariables', {
      caller: this.caller,
      variables: VARIABLES,
      optimizer: {
        kind: 'sgd',
        settings: ['lr', 'momentum', 'dampening', 'weight_decay', 'nesterov', 'maximize'],
        groups: GROUPS,
      },
    }));
    assert(placed.initializer);
    this.generation = placed.map.generation;
    const owned = new Map();
    for (const owner of placed.map.owners) {
      if (!owned.has(owner.server)) owned.set(owner.server, { address: owner.address, partitions: [] });
      owned.get(owner.server).partitions.push(owner.partition);
    }
    this.servers = [...owned].map(([incarnation, { address, partitions }]) => (
      new Server(address, incarnation, partitions, placed.layout)));
  }

  header(server, kind, parts, more = {}) {
    const counted = kind === 'PUSH_KIND_GRADIENT';
    return {
      caller: this.caller,
      server: server.incarnation,
      generation: this.generation,
      name: { source: { worker: this.incarnation }, first: this.round, last: this.round },
      kind,
      parts,
      weight: counted ? 4 : 0,
      groups: counted ? GROUPS : [],
      ...more,
    };
  }

  // A whole stream of frames, and one answer.
  once(server, method, header, payload) {
    return new Promise((resolve, reject) => {
      const stream = server.client[method](metadata, { deadline: Date.now() + DEADLINE_MS }, (error, reply) => {
        if (error) reject(error);
        else resolve(reply);
      });
      tell('frames', { method, frames: writeFrames(stream, header, payload) });
      stream.end();
    });
  }

  async initialize() {
    for (const server of this.servers) {
      const { parts, payload } = server.cut(this.values);
      await this.once(server, 'Initialize', this.header(server, 'PUSH_KIND_VALUES', parts), payload);
    }
    await untilReady(() => call(this.yard, 'CommitVariables', { caller: this.caller, generation: this.generation }));
  }

  // This round's gradients; the values become what they will be when all servers have them.
  compute(present = () => true) {
    const gradients = makeArrays((variable, index) => gradientOf(variable, index, this.round));
    gradients.forEach((gradient, variable) => {
      if (!present(variable)) return;
      for (let index = 0; index < gradient.length; index += 1) {
        this.values[variable][index] -= RATE * gradient[index];
      }
    });
    return gradients;
  }

  checkPush(server, reply, outcome) {
    const results = writtenOut(reply.parts, server.partitions);
    results.forEach((result) => {
      assert.strictEqual(result.outcome, outcome);
      assert.strictEqual(Number(result.next), this.round + 1);
    });
  }

  // The answer to a step: for each part outcome, next, life and number; then for each pulled partition life and number.
  checkWords(server, words) {
    const numbers = words.map(Number);
    const count = server.partitions.length;
    assert.strictEqual(numbers.length, 6 * count);
    for (let index = 0; index < count; index += 1) {
      const [outcome, next, , pushed] = numbers.slice(4 * index);
      const [, pulled] = numbers.slice(4 * count + 2 * index);
      assert.deepStrictEqual([outcome, next, pushed, pulled], [1, this.round + 1, this.round + 1, this.round + 1]);
    }
  }

  checkValues(pulled) {
    VARIABLES.forEach((spec, variable) => {
      const [got, expected] = [pulled[variable], this.values[variable]];
      for (let index = 0; index < got.length; index += 1) {
        if (got[index] !== expected[index]) {
          throw new Error(`${spec.name}[${index}] is ${got[index]} after push ${this.round}; expected ${expected[index]}`);
        }
      }
    });
  }

  // Push, one request; and the same push again, which must not count twice.
  async push(present) {
    const gradients = this.compute(present);
    for (const server of this.servers) {
      const { parts, payload } = server.cut(gradients, present);
      const header = this.header(server, 'PUSH_KIND_GRADIENT', parts);
      this.checkPush(server, await this.once(server, 'Push', header, payload), 'OUTCOME_APPLIED');
      this.checkPush(server, await this.once(server, 'Push', header, payload), 'OUTCOME_DUPLICATE');
    }
    this.round += 1;
  }

  // Pull, one request: the newest values.
  async pull() {
    const pulled = makeArrays(() => NaN);
    for (const server of this.servers) {
      const stream = server.client.Pull({
        caller: this.caller, server: server.incarnation, generation: this.generation, partitions: server.partitions,
      }, metadata, { deadline: Date.now() + DEADLINE_MS });
      const pieces = [];
      let header = null;
      for await (const frame of stream) {
        header = header || frame.header;
        pieces.push(frame.data);
      }
      writtenOut(header.parts, server.partitions);
      tell('frames', { method: 'Pull', frames: pieces.length });
      server.place(Buffer.concat(pieces), pulled);
    }
    return pulled;
  }

  // Several exchanges on one stream to each server: the first is a plan, which the later ones name.
  async exchange(count) {
    const streams = this.servers.map((server) => new Exchanges(server));
    for (let index = 0; index < count; index += 1) {
      const gradients = this.compute();
      const pulled = makeArrays(() => NaN);
      for (const stream of streams) {
        const { server } = stream;
        const { parts, payload } = server.cut(gradients);
        const version = { number: this.round + 1 };
        const header = this.header(server, 'PUSH_KIND_GRADIENT', parts, {
          pull: { ...version, partitions: server.partitions, wait_ms: 1000 },
        });
        const { first, last } = header.name;
        const step = { plan: 1, first, last, number: version.number };
        const said = index === 0 ? { ...header, plan: 1 } : { step };
        const answer = await stream.run(said, payload, server.nbytes);
        if (index === 0) {
          this.checkPush(server, answer.header.push, 'OUTCOME_APPLIED');
          writtenOut(answer.header.parts, server.partitions).forEach((part) => {
            assert.strictEqual(Number(part.version.number), this.round + 1);
          });
        } else this.checkWords(server, answer.header.words);
        tell('frames', { method: 'PushPull', frames: answer.frames });
        server.place(answer.payload, pulled);
      }
      this.checkValues(pulled);
      this.round += 1;
    }
    return streams;
  }

  // On the same streams: an exchange that is no push, one that has to ask again, and a push without a pull.
  async exchangeMore(streams) {
    const pulled = makeArrays(() => NaN);
    for (const stream of streams) {
      const wish = (more) => ({
        ...this.header(stream.server, 'PUSH_KIND_NOTHING', [], { name: null }),
        pull: { partitions: stream.server.partitions, ...more },
      });
      const nothing = wish({});
      const answer = await stream.run(nothing, Buffer.alloc(0));
      assert.strictEqual(answer.header.push ? answer.header.push.parts.length : 0, 0);
      stream.server.place(answer.payload, pulled);
      const later = wish({ number: this.round + 1, wait_ms: 1 });
      const missing = (await stream.run(later, Buffer.alloc(0))).header.not_yet.missing;
      assert.deepStrictEqual(missing.map((each) => each.partition), stream.server.partitions);
      missing.forEach((each) => assert.strictEqual(Number(each.have.number), this.round));
    }
    this.checkValues(pulled);
    const gradients = this.compute();
    for (const stream of streams) {
      const { parts, payload } = stream.server.cut(gradients);
      const header = this.header(stream.server, 'PUSH_KIND_GRADIENT', parts);
      const answer = await stream.run(header, payload);
      this.checkPush(stream.server, answer.header.push, 'OUTCOME_APPLIED');
      assert.strictEqual(answer.payload.length, 0);
      await stream.end();
    }
    this.round += 1;
  }

  // A push out of order is refused with its code, and the stream ends.
  async refused() {
    const [server] = this.servers;
    const { parts, payload } = server.cut(makeArrays(() => 1));
    const header = this.header(server, 'PUSH_KIND_GRADIENT', parts);
    header.name = { ...header.name, first: this.round + 1, last: this.round + 1 };
    await assert.rejects(this.once(server, 'Push', header, payload), (error) => {
      assert.strictEqual(codeOf(error), 'SequenceGap');
      return error.code === grpc.status.OUT_OF_RANGE;
    });
    await assert.rejects(new Exchanges(server).run({ step: { plan: 1 } }, payload), (error) => {
      assert.strictEqual(codeOf(error), 'MalformedPayload');
      return error.code === grpc.status.INVALID_ARGUMENT;
    });
  }

  async leave() {
    clearInterval(this.heart);
    await call(this.yard, 'Leave', { caller: this.caller });
    this.servers.forEach((server) => server.client.close());
    this.yard.close();
  }
}

function digests(arrays) {
  return Object.fromEntries(arrays.map((array, variable) => [
    VARIABLES[variable].name,
    crypto.createHash('sha256').update(Buffer.from(array.buffer, array.byteOffset, array.byteLength)).digest('hex'),
  ]));
}

async function main() {
  const worker = new Worker();
  await worker.join();
  await worker.register();
  await worker.initialize();
  worker.checkValues(await worker.pull());
  await worker.push();
  worker.checkValues(await worker.pull());
  await worker.push((variable) => VARIABLES[variable].name !== 'big');
  worker.checkValues(await worker.pull());
  const streams = await worker.exchange(4);
  await worker.exchangeMore(streams);
  worker.checkValues(await worker.pull());
  await worker.refused();
  worker.checkValues(await worker.pull());
  await wait('trained', { servers: worker.servers.length, pushes: worker.round, digests: digests(worker.values) });
  // another worker has pushed meanwhile
  await wait('pulled', { digests: digests(await worker.pull()) });
  await worker.leave();
  tell('left');
  process.exit(0);
}

main().catch((error) => {
  process.stderr.write(`${error.stack || error}\n`);
  process.exit(1);
});
