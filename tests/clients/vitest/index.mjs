// What the conformance tests of Durable Streams use of vitest, in its place: vitest itself brings a bundler with native
// binaries. Tests are collected, and run by ../conformance.mjs.

import assert from "node:assert/strict";
import { isDeepStrictEqual } from "node:util";

// `{ name, run }` of each test; `name` is that of its group and its own.
export const collected = [];
const groups = [];

export function describe(name, define) {
  groups.push(name);
  define();
  groups.pop();
}

// A group of tests that some servers are asked for only: all are listed.
describe.runIf = () => describe;

export function test(name, run) {
  collected.push({ name: [...groups, name].join(" > "), run });
}
test.concurrent = test;

class ObjectContaining {
  constructor(part) { this.part = part; }
  matches(value) {
    return Object.entries(this.part).every(([key, wanted]) => isDeepStrictEqual(value?.[key], wanted));
  }
}

const MATCHERS = {
  toBe: (seen, wanted) => Object.is(seen, wanted),
  toEqual: (seen, wanted) => wanted instanceof ObjectContaining ? wanted.matches(seen) : isDeepStrictEqual(seen, wanted),
  toContain: (seen, wanted) => seen.includes(wanted),
  toContainEqual: (seen, wanted) => [...seen].some((item) => MATCHERS.toEqual(item, wanted)),
  toBeDefined: (seen) => seen !== undefined,
  toBeUndefined: (seen) => seen === undefined,
  toBeNull: (seen) => seen === null,
  toBeTruthy: (seen) => Boolean(seen),
  toBeGreaterThan: (seen, wanted) => seen > wanted,
  toBeGreaterThanOrEqual: (seen, wanted) => seen >= wanted,
  toBeLessThan: (seen, wanted) => seen < wanted,
  toBeLessThanOrEqual: (seen, wanted) => seen <= wanted,
  toMatch: (seen, wanted) => wanted instanceof RegExp ? wanted.test(seen) : seen.includes(wanted),
};

function checks(seen, text, negated) {
  const found = {};
  for (const [name, holds] of Object.entries(MATCHERS)) {
    found[name] = (...wanted) => {
      const shown = JSON.stringify([seen, ...wanted]) ?? "";
      assert.ok(holds(seen, ...wanted) !== negated, `${text ?? ""} ${negated ? "not " : ""}${name} ${shown}`);
    };
  }
  return found;
}

export function expect(seen, text) {
  const thrown = async () => Promise.resolve(seen).then(() => assert.fail("it didn't fail"), (error) => error);
  return {
    ...checks(seen, text, false),
    not: checks(seen, text, true),
    rejects: { toThrow: async (wanted) => assert.match(String((await thrown()).message), new RegExp(wanted ?? "")) },
  };
}
expect.objectContaining = (part) => new ObjectContaining(part);

export const vi = {};
