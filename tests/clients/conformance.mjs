// Runs tests of @durable-streams/server-conformance-tests against a server: `node conformance.mjs URL`. Their names come as
// a JSON list on standard input; without one, all names are printed. Prints a line of JSON for each test.

import { runConformanceTests } from "@durable-streams/server-conformance-tests";
import fc from "fast-check";
import { collected } from "vitest";

const AT_ONCE = 8;
const TIMEOUT_MS = 150_000;

// The package ends a request after 0.5 to 5 s by itself and takes what came until then, if anything did. That is too soon
// for a busy machine, and for a long poll without news, which the server answers after 15 s.
const PATIENCE_MS = 20_000;
const setTimer = globalThis.setTimeout;
globalThis.setTimeout = (call, ms, ...args) => setTimer(call, ms >= 500 && ms < PATIENCE_MS ? PATIENCE_MS : ms, ...args);

// Every run tries the same examples; `SEED=…` tries others.
fc.configureGlobal({ seed: Number(process.env.SEED ?? 1) });
runConformanceTests({ baseUrl: process.argv[2], longPollTimeoutMs: 30_000 });
let input = "";
for await (const part of process.stdin) input += part;
const say = (line) => process.stdout.write(JSON.stringify(line) + "\n");

async function outcome(test) {
  let timer;
  const late = new Promise((_, reject) => { timer = setTimer(() => reject(new Error("timeout")), TIMEOUT_MS); });
  try {
    await Promise.race([test.run(), late]);
    return { name: test.name, ok: true };
  } catch (error) {
    return { name: test.name, ok: false, error: String(error?.stack ?? error) };
  } finally {
    clearTimeout(timer);
  }
}

if (input.trim()) {
  const wanted = new Set(JSON.parse(input));
  const left = collected.filter((test) => wanted.has(test.name));
  await Promise.all(Array.from({ length: AT_ONCE }, async () => {
    while (left.length) say(await outcome(left.shift()));
  }));
} else {
  for (const test of collected) say({ name: test.name });
}
// Connections that tests left open would keep it running. What was said leaves first.
process.stdout.write("", () => process.exit(0));
