// Graphile Worker's side: node graphile.cjs HOME install|work HOST PORT USER DATABASE [MARKS BATCH]
// The worker writes the same marks as the Python ones (marks.py): count, first start, gate, starts by number.
"use strict";
const fs = require("fs");
const { createRequire } = require("module");

const [home, what, host, port, user, database, path, batch] = process.argv.slice(2);
const load = createRequire(`${home}/package.json`);
const { Pool } = load("pg");
const { run, runMigrations } = load("graphile-worker");
const { Logger } = load("@graphile/logger");

const CONCURRENCY = 24;
const [COUNT, FIRST, SHUT, STAMPS] = [0, 8, 16, 24];
const silent = new Logger(() => () => {});
const pgPool = new Pool({ host, port: Number(port), user, database, max: CONCURRENCY + 1 });

function marks() {
  const file = fs.openSync(path, "r+");
  const word = Buffer.alloc(8);
  const asleep = new Int32Array(new SharedArrayBuffer(4));
  let count = 0n;
  let told = false;
  const write = (value, at) => {
    word.writeBigInt64LE(value);
    fs.writeSync(file, word, 0, 8, at);
  };
  const tell = () => {
    told = false;
    write(count, COUNT);
  };
  const pass = () => {
    for (;;) {
      fs.readSync(file, word, 0, 8, SHUT);
      if (word.readBigInt64LE() === 0n) return;
      Atomics.wait(asleep, 0, 0, 0.5);
    }
  };
  return (number) => {
    const now = process.hrtime.bigint();
    if (number >= 0) write(now, STAMPS + 8 * number);
    count += 1n;
    if (count === 1n) {
      write(now, FIRST);
      tell();
    }
    if (told) return;
    // Once for all handlers of a turn of the event loop: node shares no memory with other processes.
    told = true;
    setImmediate(tell);
    pass();
  };
}

async function work() {
  const started = marks();
  const fast = {
    localQueue: { size: Number(batch), refetchDelay: { durationMs: 10 } },
    completeJobBatchDelay: 0,
    failJobBatchDelay: 0,
  };
  const one = Number(batch) === 1;
  const runner = await run({
    preset: { worker: one ? { concurrentJobs: 1 } : { concurrentJobs: CONCURRENCY, ...fast } },
    pgPool,
    logger: silent,
    taskList: { noop: (payload) => started(payload.n ?? -1) },
  });
  await runner.promise;
}

(what === "install" ? runMigrations({ pgPool, logger: silent }).then(() => pgPool.end()) : work()).catch((error) => {
  console.error(error);
  process.exit(1);
});
