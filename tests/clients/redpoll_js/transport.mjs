// The transport, with the AI SDK's own reader, over a source that the test controls: chunks of the AI SDK, gaps, silence.
// It is copied to a folder with the package and run; it throws where something isn't as it should be.
import assert from "node:assert/strict";
import { getEventListeners } from "node:events";
import { mock } from "node:test";
import { readUIMessageStream } from "ai";
import { followTexts } from "redpoll-js";
import { RedpollChatTransport } from "redpoll-js/ai";

function made(options = {}) {
  const state = { listener: null, posted: [] };
  const source = {
    follow(channel, listener) {
      assert.equal(channel, "chat-1");
      state.listener = listener;
      listener.connection(true);
      if (!options.isLate) listener.caughtUp();
      return () => (state.isLeft = true);
    },
  };
  const answer = options.fetch || (async (api, request) => {
    state.posted.push([api, JSON.parse(request.body), Object.fromEntries(request.headers)]);
    return Response.json({ stream: "a" });
  });
  state.transport = new RedpollChatTransport({ source, fetch: answer, silenceMs: Infinity, ...options });
  state.send = (type, more = {}, stream = "a") => state.listener.message(type, { stream, type, ...more }, false);
  return state;
}

const ask = { trigger: "submit-message", chatId: "1", messageId: undefined, messages: [{ id: "q", role: "user", parts: [] }] };

// The message that the AI SDK makes of a stream, and the error that ends it.
async function messageOf(stream) {
  let message = null;
  let error = null;
  try {
    for await (const next of readUIMessageStream({ stream, terminateOnError: true })) message = next;
  } catch (found) {
    error = found.message;
  }
  return { message, error };
}

// A page that is loaded: `stored` sends what is there before it.
async function loading(stored) {
  const state = made({ isLate: true });
  const ready = state.transport.ready("1");
  stored(state);
  state.listener.caughtUp();
  await ready;
  return state;
}

const BEGINNING = [
  ["start", {}],
  ["start-step", {}],
  ["reasoning-start", { id: "a-0" }],
  ["reasoning-delta", { id: "a-0", delta: "Hm" }],
  ["reasoning-delta", { id: "a-0", delta: "m." }],
  ["reasoning-end", { id: "a-0" }],
  ["tool-input-start", { toolCallId: "t", toolName: "find" }],
  ["tool-input-delta", { toolCallId: "t", inputTextDelta: '{"bird":' }],
  ["tool-input-delta", { toolCallId: "t", inputTextDelta: '"🐦"}' }],
  ["tool-input-available", { toolCallId: "t", toolName: "find", input: { bird: "🐦" } }],
  ["tool-output-available", { toolCallId: "t", output: { found: 1 } }],
  ["text-start", { id: "a-1" }],
  ["text-delta", { id: "a-1", delta: "One " }],
];
const END = [
  ["text-delta", { id: "a-1", delta: "bird." }],
  ["text-end", { id: "a-1" }],
  ["finish-step", {}],
  ["finish", { messageMetadata: { tokens: 3 } }],
];

function isWhole({ message, error }) {
  assert.equal(error, null);
  assert.equal(message.id, "a");
  assert.deepEqual(message.metadata, { tokens: 3 });
  const [step, reasoning, tool, text] = message.parts;
  assert.equal(step.type, "step-start");
  assert.equal(reasoning.text, "Hmm.");
  assert.deepEqual([tool.type, tool.state, tool.input, tool.output], ["tool-find", "output-available", { bird: "🐦" }, { found: 1 }]);
  assert.deepEqual([text.text, text.state], ["One bird.", "done"]);
}

// Chunks reach the page that asked, also if the first came before the answer to its request, and one that resumes.
{
  let answer;
  const posted = new Promise((resolve) => (answer = resolve));
  const bodies = [];
  const { transport, send } = made({
    fetch: (api, request) => (bodies.push([api, JSON.parse(request.body), request.headers.get("x-page")]), posted),
    headers: { "X-Page": "1" },
    body: { model: "m" },
  });
  const heard = [];
  const unwatch = transport.watch("1", (id) => heard.push(id));
  const asked = transport.sendMessages({ ...ask, body: { temperature: 1 } });
  while (!bodies.length) await new Promise((resolve) => setImmediate(resolve));
  for (const [type, more] of BEGINNING) send(type, more);
  answer(Response.json({ stream: "a" }));
  const first = await asked;
  const resumed = await transport.reconnectToStream({ chatId: "1" });
  const stopped = new AbortController();
  const left = await transport.reconnectToStream({ chatId: "1", abortSignal: stopped.signal });
  stopped.abort();
  await assert.rejects(async () => { for await (const chunk of left) assert.ok(chunk); }, { name: "AbortError" });
  for (const [type, more] of END) send(type, more);
  for (const stream of [first, resumed]) isWhole(await messageOf(stream));
  assert.deepEqual(heard, [], "the page's own answer is no news");
  const { messages, trigger } = ask;
  assert.deepEqual(bodies, [["/api/chat", { model: "m", temperature: 1, id: "1", messages, trigger }, "1"]]);
  assert.equal(await transport.reconnectToStream({ chatId: "1" }), null, "nothing is under way");
  send("start", {}, "b");
  send("start", {}, "b");
  assert.deepEqual(heard, ["b"], "another page's answer is news once");
  unwatch();
  transport.close();
}

// A gap ends the answer as failed. If all of it is still stored, it is news again, and whole.
{
  const state = made();
  const { transport, send } = state;
  await transport.ready("1");
  const { listener } = state;
  const heard = [];
  transport.watch("1", (id) => heard.push(id));
  for (const [type, more] of BEGINNING) send(type, more);
  const cut = await transport.reconnectToStream({ chatId: "1" });
  listener.gap();
  const { message, error } = await messageOf(cut);
  assert.equal(error, "parts of the answer are missing");
  assert.equal(message.metadata.state, "failed");
  listener.restart();
  for (const [type, more] of BEGINNING) send(type, more);
  assert.deepEqual(heard, ["a", "a"]);
  const again = await transport.reconnectToStream({ chatId: "1" });
  for (const [type, more] of END) send(type, more);
  isWhole(await messageOf(again));
  // Without its beginning it isn't shown as one.
  listener.restart();
  send("text-delta", { id: "c-1", delta: "bird." }, "c");
  assert.equal(await transport.reconnectToStream({ chatId: "1" }), null);
  transport.close();
}

// An answer that ends before the page reads it is resumed once: one under way when the page loads what is stored, or one
// that a watcher hears of. What ended before is among the stored messages.
{
  const { transport, send, listener } = await loading((state) => {
    for (const [type, more] of [...BEGINNING, ...END]) state.send(type, more, "old");
    for (const [type, more] of BEGINNING) state.send(type, more);
  });
  for (const [type, more] of END) send(type, more);
  const stopped = AbortSignal.abort();
  await assert.rejects(transport.reconnectToStream({ chatId: "1", abortSignal: stopped }), { name: "AbortError" });
  isWhole(await messageOf(await transport.reconnectToStream({ chatId: "1" })));
  assert.equal(await transport.reconnectToStream({ chatId: "1" }), null, "the page has it");

  let resumed = null;
  const unwatch = transport.watch("1", () => (resumed = transport.reconnectToStream({ chatId: "1" })));
  const text = (more, stream) => listener.message("answer", { stream, ...more }, false);
  text({ n: 0, length: 3, delta: "One" }, "b");
  text({ n: 1, length: 3, state: "done" }, "b");
  const { message } = await messageOf(await resumed);
  assert.deepEqual([message.id, message.parts[0].text], ["b", "One"]);

  // A second reading of what is stored brings nothing that the page has, and an answer whose end was missed.
  const again = () => {
    listener.gap();
    listener.restart();
    text({ n: 1, length: 3, delta: "One", state: "done" }, "b");
  };
  again();
  assert.equal(await transport.reconnectToStream({ chatId: "1" }), null);
  text({ n: 0, length: 4, delta: "Two " }, "c");
  const cut = messageOf(await resumed);
  again();
  assert.equal((await cut).error, "parts of the answer are missing");
  text({ n: 2, length: 9, delta: "Two birds", state: "done" }, "c");
  const { message: whole, error } = await messageOf(await resumed);
  assert.deepEqual([error, whole.id, whole.parts[0].text], [null, "c", "Two birds"]);
  // Without its beginning it would replace what the page has.
  text({ n: 0, length: 4, delta: "Six " }, "d");
  await resumed;
  again();
  text({ n: 2, length: 9, delta: "birds", state: "done" }, "d");
  assert.equal(await resumed, null);
  unwatch();
  transport.close();
}

// What the page loads after `ready` has the answers that have ended by then, and an answer that wasn't read comes back
// behind no newer one.
{
  const { transport, listener } = await loading(() => {});
  const text = (more, stream) => listener.message("answer", { stream, ...more }, false);
  text({ n: 0, length: 3, delta: "One", state: "done" }, "others");
  await transport.ready("1");
  assert.equal(await transport.reconnectToStream({ chatId: "1" }), null);
  text({ n: 0, length: 3, delta: "One", state: "cancelled" }, "stopped");
  text({ n: 0, length: 3, delta: "Two" }, "newer");
  const newer = messageOf(await transport.reconnectToStream({ chatId: "1" }));
  text({ n: 1, length: 3, state: "done" }, "newer");
  assert.equal((await newer).message.id, "newer");
  assert.equal(await transport.reconnectToStream({ chatId: "1" }), null);
  transport.close();
}

// An answer of which nothing comes has failed; when it goes on, it is news, and whole.
{
  const state = made({ silenceMs: 1 });
  const { transport, send } = state;
  await transport.ready("1");
  for (const [type, more] of BEGINNING) send(type, more);
  const silent = await messageOf(await transport.sendMessages(ask));
  assert.equal(silent.error, "nothing came any more");
  const news = new Promise((resolve) => transport.watch("1", resolve));
  send(...END[0]);
  assert.equal(await news, "a");
  const again = await transport.reconnectToStream({ chatId: "1" });
  for (const [type, more] of END.slice(1)) send(type, more);
  isWhole(await messageOf(again));
  transport.close();
  assert.ok(state.isLeft);
}

// So it has if the source asks the server again meanwhile, as over HTTP. Only time without a connection doesn't count.
{
  mock.timers.enable({ apis: ["setTimeout"] });
  const state = made({ silenceMs: 1000 });
  const { transport, send } = state;
  await transport.ready("1");
  const heard = [];
  transport.watch("1", (id) => heard.push(id));
  send("start");
  const stream = await transport.reconnectToStream({ chatId: "1" });
  state.listener.connection(false);
  mock.timers.tick(60_000);
  state.listener.connection(true);
  send("start-step");
  assert.deepEqual(heard, ["a"], "it was not given up");
  mock.timers.tick(600);
  state.listener.connection(true);
  mock.timers.tick(400);
  assert.equal((await messageOf(stream)).error, "nothing came any more");
  transport.close();
  mock.timers.reset();
}

// What the back end refuses, or answers wrongly, is the caller's error; so is a channel that may not be read.
{
  const refusing = made({ fetch: async () => new Response("not you", { status: 403 }) });
  await assert.rejects(refusing.transport.sendMessages(ask), { message: "not you" });
  const wrong = made({ fetch: async () => Response.json({}) });
  await assert.rejects(wrong.transport.sendMessages(ask), { message: '/api/chat must answer with JSON: {"stream": ID}' });
  const late = made({ isLate: true });
  const resuming = late.transport.reconnectToStream({ chatId: "1" });
  const stopped = new AbortController();
  const sending = late.transport.sendMessages({ ...ask, abortSignal: stopped.signal });
  stopped.abort();
  await assert.rejects(sending, { name: "AbortError" });
  late.listener.failed(new Error("403"));
  await assert.rejects(resuming, { message: "403" });
  for (const { transport } of [refusing, wrong, late]) transport.close();
}

// A page that watches hears of answers also after the channel was refused and is read again, until it stops.
{
  const state = made();
  const heard = [];
  const unwatch = state.transport.watch("1", (id) => heard.push(id));
  state.listener.failed(new Error("401"));
  await state.transport.ready("1");
  state.send("start", {}, "b");
  assert.deepEqual(heard, ["b"]);
  unwatch();
  state.send("start", {}, "c");
  assert.deepEqual(heard, ["b"]);
  state.transport.close();
}

// Another subscriber can't answer: its events are neither chunks nor texts, unless the page names them.
{
  const state = made();
  const heard = [];
  state.transport.watch("1", (id) => heard.push(id));
  const stream = await state.transport.sendMessages(ask);
  const listeners = [state.listener];
  const follow = (options) => followTexts({ follow: (_, listener) => (listeners.push(listener), () => {}) }, "chat-1", options);
  const all = follow({});
  const named = follow({ event: "client-x" });
  const ending = follow({ ends: { "client-end": "done" } });
  const send = (event, data) => listeners.forEach((listener) => listener.message(event, data, false));
  const forged = (id) => ["start", "tool-input-available", "finish"].forEach((type) => send("client-x", { stream: id, type }));
  forged("a");
  forged("b");
  send("client-x", { stream: "c", n: 0, length: 3, delta: "lie", state: "done" });
  assert.deepEqual(heard, []);
  assert.deepEqual(all.view().texts, []);
  assert.deepEqual(named.view().texts, [{ id: "c", text: "lie", state: "done" }]);
  for (const [type, more] of [...BEGINNING, ...END]) state.send(type, more);
  isWhole(await messageOf(stream));
  send("answer", { stream: "d", n: 0, length: 3, delta: "One" });
  send("client-end", { stream: "d" });
  assert.equal(all.view().texts[0].state, "streaming");
  assert.equal(ending.view().texts[0].state, "done");
  for (const following of [all, named, ending]) following.close();
  state.transport.close();
}

// A page that waits for its connection keeps the chat for as long as it waits, and no longer than it is used.
{
  mock.timers.enable({ apis: ["setTimeout"] });
  const state = made({ isLate: true });
  const resuming = state.transport.reconnectToStream({ chatId: "1" });
  mock.timers.tick(60_000);
  assert.ok(!state.isLeft);
  state.send("start");
  state.listener.caughtUp();
  const stream = await resuming;
  mock.timers.tick(60_000);
  assert.ok(!state.isLeft);
  await stream.cancel();
  mock.timers.tick(60_000);
  assert.ok(state.isLeft);

  // A reader's end counts once, however it ends: 30 s after the last one the chat is left. Nothing stays at the signal.
  const ends = {
    finish: ({ send }) => send("finish"),
    error: ({ listener }) => listener.gap(),
    abort: (_state, _stream, stopping) => stopping.abort(),
    cancel: (_state, stream) => stream.cancel(),
  };
  for (const [name, end] of Object.entries(ends)) {
    const long = made();
    const stopping = new AbortController();
    const answer = await long.transport.sendMessages({ ...ask, abortSignal: stopping.signal });
    long.send("start");
    mock.timers.tick(45_000);
    assert.ok(!long.isLeft, name);
    await end(long, answer, stopping);
    assert.deepEqual(getEventListeners(stopping.signal, "abort"), [], name);
    mock.timers.tick(20_000);
    stopping.abort();
    await answer.cancel().catch(() => {});
    mock.timers.tick(9_999);
    assert.ok(!long.isLeft, name);
    mock.timers.tick(1);
    assert.ok(long.isLeft, name);
  }

  const refused = made({ fetch: async () => (mock.timers.tick(60_000), new Response("busy", { status: 503 })) });
  await assert.rejects(refused.transport.sendMessages(ask), { message: "busy" });
  assert.ok(!refused.isLeft);
  mock.timers.tick(60_000);
  assert.ok(refused.isLeft);
  mock.timers.reset();
}

// A transport that is closed ends what waits and what is read.
{
  const { transport, send } = made();
  const stream = await transport.sendMessages(ask);
  send("start");
  transport.close();
  await assert.rejects(async () => { for await (const chunk of stream) assert.ok(chunk); }, { name: "AbortError" });
  const late = made({ isLate: true });
  const waiting = [late.transport.ready("1"), late.transport.reconnectToStream({ chatId: "1" })];
  late.transport.close();
  for (const promise of waiting) await assert.rejects(promise, { name: "AbortError" });
}
console.log("ok");
