// streamSource and the authorizer, with answers that the test makes: broken streams, wrong servers, handlers that throw.
// Also a component that makes its source in place.
// It is copied to a folder with the package and run; it throws where something isn't as it should be.
import assert from "node:assert/strict";
import { mock } from "node:test";
import { createElement } from "react";
import renderer, { act } from "react-test-renderer";
import redpoll from "redpoll-js";
import { useText } from "redpoll-js/react";

const turn = () => new Promise((resolve) => setImmediate(resolve));

const stream = (...blocks) => {
  const body = blocks.map(([event, data]) => `event: ${event}\ndata: ${JSON.stringify(data)}\n\n`).join("");
  return new Response(body, { headers: { "Content-Type": "text/event-stream" } });
};
const message = (offset, delta) => ({ offset, event: "answer", data: JSON.stringify({ id: "a", delta }), time_ms: 1 });

// A stream that breaks between messages and their position has them again in the next answer: each counts once.
{
  const positions = [];
  const answers = [
    () => stream(["data", [message(1, "One ")]], ["control", { streamNextOffset: "e_1" }], ["data", [message(2, "two ")]]),
    () => stream(["data", [message(2, "two "), message(3, "three")]], ["control", { streamNextOffset: "e_3", streamClosed: true }]),
  ];
  const source = redpoll.streamSource({
    server: "http://server", app: "1",
    fetch: async (address) => (positions.push(new URL(address).searchParams.get("offset")), answers.shift()()),
  });
  const text = await new Promise((resolve) =>
    redpoll.followTexts(source, "a", { fields: { id: "id" } }, ({ texts }) => texts[0]?.text.endsWith("three") && resolve(texts[0].text)),
  );
  assert.equal(text, "One two three");
  assert.deepEqual(positions, ["-1", "e_1"]);
}

// Characters that end a line in JavaScript, and not in a stream, are text like any other.
{
  const text = "one\u2028two\u2029three\u0085four";
  const whole = () => stream(["data", [message(1, text)]], ["control", { streamNextOffset: "e_1", upToDate: true, streamClosed: true }]);
  const view = await new Promise((resolve, reject) => {
    const answers = [whole];
    const fetch = async () => (answers.length ? answers.shift()() : reject(new Error("it was asked again")));
    const source = redpoll.streamSource({ server: "http://server", app: "1", fetch });
    redpoll.followTexts(source, "a", { fields: { id: "id" } }, (next) => next.caughtUp && resolve(next));
  });
  assert.equal(view.texts[0].text, text);
}

// A component that makes its source in place asks once, with the functions of its latest rendering, and again for another app.
{
  globalThis.IS_REACT_ACT_ENVIRONMENT = true;
  const asked = [];
  let next;
  const answering = (label) => async (address, { headers }) => {
    asked.push([label, new URL(address).pathname, headers.Authorization]);
    await new Promise((resolve) => (next = resolve));
    return stream(["control", { streamNextOffset: "e_1", upToDate: true }]);
  };
  const rendered = [];
  function Component({ label, app }) {
    const source = redpoll.streamSource({ server: new URL("http://server"), app, token: () => label, fetch: answering(label) });
    rendered.push(useText("a", { source }).state);
    assert.ok(rendered.length < 50, "it renders without an end");
    return null;
  }
  let root;
  const show = (properties) => act(async () => {
    if (root) root.update(createElement(Component, properties));
    else root = renderer.create(createElement(Component, properties));
    for (let turns = 0; turns < 20; turns += 1) await turn();
  });
  await show({ label: "first", app: "1" });
  await show({ label: "second", app: "1" });
  assert.deepEqual(asked, [["first", "/apps/1/channels/a/stream", "Bearer first"]]);
  // Its answer ends, so the next request follows.
  await act(async () => {
    next();
    while (asked.length < 2) await turn();
  });
  assert.equal(rendered.at(-1), "none");
  await show({ label: "third", app: "2" });
  assert.deepEqual(asked.slice(1), [
    ["second", "/apps/1/channels/a/stream", "Bearer second"],
    ["third", "/apps/2/channels/a/stream", "Bearer third"],
  ]);
  await act(async () => root.unmount());
}

// A server that isn't redpoll's, and answers everything with a page, isn't asked without a pause.
{
  mock.timers.enable({ apis: ["setTimeout"] });
  let asked = 0;
  const source = redpoll.streamSource({ server: "http://server", app: "1", fetch: async () => ((asked += 1), new Response("<html>")) });
  const following = redpoll.followTexts(source, "a");
  for (let turns = 0; turns < 200; turns += 1) await turn();
  assert.equal(asked, 1);
  mock.timers.tick(250);
  for (let turns = 0; turns < 200; turns += 1) await turn();
  assert.equal(asked, 2);
  following.close();
  mock.timers.reset();
}

// A proxy that has no route while the server is away ends no reading that has worked; a refusal of the server does.
{
  mock.timers.enable({ apis: ["setTimeout"] });
  const up = () => stream(["control", { streamNextOffset: "e_1", upToDate: true }]);
  const gone = () => new Response("no route", { status: 404 });
  const unknown = () => Response.json({ error: "no such app", code: "not_found" }, { status: 404 });
  const failures = [];
  const follow = (...answers) => {
    const source = redpoll.streamSource({ server: "http://server", app: "1", fetch: async () => answers.shift()() });
    return source.follow("a", {
      message() {}, caughtUp() {}, connection() {}, gap() {}, restart() {}, failed: (error) => failures.push(error.message),
    });
  };
  const passed = async () => {
    for (let seconds = 0; seconds < 60; seconds += 1) {
      for (let turns = 0; turns < 20; turns += 1) await turn();
      mock.timers.tick(1000);
    }
  };
  follow(up, gone, up, unknown);
  await passed();
  assert.equal(failures.length, 1);
  assert.ok(failures[0].includes("no such app"));
  follow(gone);
  await passed();
  assert.equal(failures.length, 2);
  assert.ok(failures[1].endsWith("answered 404: no route"));
  // What doesn't heal ends it, also without a code; the server's 408 does heal.
  for (const status of [400, 401, 403]) {
    follow(up, () => new Response("sign in", { status }));
    await passed();
    assert.ok(failures.pop().endsWith(`answered ${status}: sign in`));
  }
  const late = () => Response.json({ error: "late", code: "bad_request" }, { status: 408 });
  const early = () => new Response("", { status: 425 });
  follow(up, late, early, up, unknown);
  await passed();
  assert.ok(failures.pop().includes("no such app"));
  assert.equal(failures.length, 2);
  mock.timers.reset();
}

// Functions of the page that throw refuse the channels, and no handler of one channel keeps another from its answer.
{
  const outcomes = {};
  const ask = (authorizer, ...names) =>
    Promise.all(names.map((channelName) => new Promise((resolve) =>
      authorizer({ socketId: "1.1", channelName }, (error, data) => {
        outcomes[channelName] = error ? error.message : data.auth;
        resolve();
        if (channelName === "private-a") throw new Error("a page's handler");
      }),
    )));
  const thrown = [];
  process.on("uncaughtException", (error) => thrown.push(error.message));
  for (const option of ["params", "headers"]) {
    const throwing = () => { throw new Error(`no ${option}`); };
    await ask(redpoll.authorizer({ endpoint: "http://server/auth", [option]: throwing }), "private-a", "private-b");
    assert.deepEqual(outcomes, { "private-a": `no ${option}`, "private-b": `no ${option}` });
  }
  globalThis.fetch = async () => Response.json({ "private-a": { status: 200, data: { auth: "k:a" } }, "private-b": { status: 200, data: { auth: "k:b" } } });
  await ask(redpoll.authorizer({ endpoint: "http://server/auth" }), "private-a", "private-b");
  assert.deepEqual(outcomes, { "private-a": "k:a", "private-b": "k:b" });
  assert.deepEqual(thrown, Array(3).fill("a page's handler"));
}
console.log("ok");
process.exit(0);
