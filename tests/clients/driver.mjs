// Drives the official JavaScript libraries for tests/clients and tests/matrix: one command a line on stdin, one answer or
// event a line on stdout, all JSON. It decides nothing and asserts nothing; tests/clients/node.py is the other end.
//
//   in:   {"id": 1, "do": "connect", ...}          out:  {"id": 1, "ok": ...} or {"id": 1, "error": "text"}
//   out, unasked: {"client": "a", "channel": "x", "event": "e", "data": ..., "user_id": ...}
//                 {"client": "a", "state": "connected"}, {"client": "a", "error_code": 4301, "error": "text"}
//
// After `browser`, a command with "in_browser": true is carried out by the page in Chromium, with the same answers.

import { createInterface } from "node:readline";
import Echo from "laravel-echo";
import Pusher from "pusher-js";
import nacl from "tweetnacl";
import redpoll from "../../src/redpoll/control/static/redpoll.js";
import { pageCommands, plain } from "./page.mjs";

// Most tests use neither playwright-core nor the server library, and importing the first takes as long as everything else
// that a test of a library does. So these two are imported by the commands that need them.
const servers = new Map();
const mounted = new Map();
let browser = null;
let page = null;

const say = (message) => process.stdout.write(JSON.stringify(message) + "\n");

function pick(map, name) {
  if (!map.has(name)) throw new Error(`nothing is called ${name}`);
  return map.get(name);
}

const commands = {
  ...pageCommands({ Pusher, Echo, redpoll, say, more: { nacl } }),

  // pusher (npm), the server library
  server: async ({ client, options }) => {
    const { default: PusherServer } = await import("pusher");
    servers.set(client, new PusherServer(options));
  },
  server_call: async ({ client, method, args }) => {
    const answer = await pick(servers, client)[method](...args);
    const text = await answer.text();
    return { status: answer.status, body: JSON.parse(text), trace_id: answer.headers.get("x-service-trace-id") };
  },
  server_authorize: ({ client, args }) => pick(servers, client).authorizeChannel(...args),
  server_authenticate_user: ({ client, args }) => pick(servers, client).authenticateUser(...args),

  // Echo's hooks for React and Vue
  hooks_mount: async ({ client, framework, options }) => {
    const { mount } = await import("./hooks.mjs");
    mounted.set(client, await mount(framework, { Pusher, ...options }, (news) => say({ client, ...news })));
  },
  hooks_unmount: ({ client }) => pick(mounted, client)(),

  // Chromium, on a page that has the commands of page.mjs as `run(name, parameters)`
  browser: async ({ url, options }) => {
    const { chromium } = await import("playwright-core");
    browser = await chromium.launch(options);
    page = await browser.newPage();
    page.on("pageerror", (error) => say({ page_error: String(error) }));
    await page.exposeFunction("say", say);
    await page.goto(url);
    await page.waitForFunction("window.run");
    return browser.version();
  },
};

const inPage = (name, parameters) => page.evaluate(([name, parameters]) => window.run(name, parameters), [name, parameters]);

for await (const line of createInterface({ input: process.stdin })) {
  const { id, do: name, in_browser: inBrowser, ...parameters } = JSON.parse(line);
  // A slow command (an HTTP call) does not hold up the next one: tests publish from several at once.
  Promise.resolve()
    .then(() => (inBrowser ? inPage(name, parameters) : commands[name](parameters)))
    .then((ok) => say({ id, ok: plain(ok) }))
    .catch((error) => say({ id, error: error?.body ? `${error.message} ${error.status} ${error.body}` : String(error) }));
}
await browser?.close();
process.exit(0);
