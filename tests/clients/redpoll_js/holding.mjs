// What components and pages share: subscriptions of pusher-js, and the texts on them, over a running server.
// It is copied to a folder with the package and run with the server's address and credentials; it throws where something
// isn't as it should be. Channels `raw-…` store each piece, and pieces that wait are joined; `private-encrypted-…` too.
import assert from "node:assert/strict";
import Pusher from "pusher-js";
import PusherServer from "pusher";
import { createElement } from "react";
import renderer, { act } from "react-test-renderer";
import redpoll from "redpoll-js";
import { RedpollChatTransport } from "redpoll-js/ai";
import { useChannel, useText } from "redpoll-js/react";
import nacl from "tweetnacl";

const { key, secret, appId, port } = JSON.parse(process.argv[2]);
const encryptionMasterKeyBase64 = Buffer.alloc(32, 7).toString("base64");
const backend = new PusherServer({ appId, key, secret, host: "127.0.0.1", port: String(port), encryptionMasterKeyBase64 });
const FIELDS = { id: "message_id", delta: "delta" };
const END = { stream_end: "done" };
const WRONG = `${key}:${"0".repeat(64)}`;
globalThis.IS_REACT_ACT_ENVIRONMENT = true;

const turn = () => new Promise((resolve) => setTimeout(resolve, 1));

async function until(found) {
  for (;;) {
    const value = await found();
    if (value) return value;
    await turn();
  }
}

// React renders what came in an `act` at its end.
const rendered = (found) => until(async () => found() || (await act(turn), false));

const sign = ({ socketId, channelName }, callback) => callback(null, backend.authorizeChannel(socketId, channelName));

async function connected(customHandler = sign) {
  const pusher = redpoll(new Pusher(key, {
    cluster: "any", wsHost: "127.0.0.1", wsPort: port, forceTLS: false, enabledTransports: ["ws"], nacl,
    channelAuthorization: { customHandler },
  }));
  await until(() => pusher.connection.state === "connected");
  return pusher;
}

// A hook on a component: what each rendering saw. `use` is changed by `show`.
function mounted(use) {
  const seen = [];
  function Component({ run }) {
    seen.push(run());
    return null;
  }
  let root;
  const show = (next) => act(async () => root.update(createElement(Component, { run: next })));
  act(() => (root = renderer.create(createElement(Component, { run: use }))));
  return { seen, show, now: () => seen.at(-1), leave: () => act(async () => root.unmount()) };
}

async function subscribers(channel) {
  const answer = await backend.get({ path: `/channels/${channel}`, params: { info: "subscription_count" } });
  return (await answer.json()).subscription_count ?? 0;
}

// A component that leaves before its channel was signed, and one that comes then: the channel stays subscribed.
async function leftBeforeSigned() {
  const asked = [];
  const pusher = await connected((params, callback) => asked.push(() => sign(params, callback)));
  const first = mounted(() => useChannel("private-slow", {}, { source: pusher }));
  await until(() => asked.length);
  await first.leave();
  await until(() => pusher.channel("private-slow").subscriptionCancelled);
  const goals = [];
  const second = mounted(() => useChannel("private-slow", { goal: (data) => goals.push(data) }, { source: pusher }));
  await act(async () => asked.splice(0).forEach((answer) => answer()));
  await rendered(() => second.now().status === "subscribed");
  await backend.trigger("private-slow", "goal", 1);
  await until(() => goals.length);
  assert.equal(await subscribers("private-slow"), 1);
  await second.leave();
  await until(async () => (await subscribers("private-slow")) === 0);
  pusher.disconnect();
}

// The history of such a channel is read as that of any other.
async function textLeftBeforeSigned() {
  const asked = [];
  const pusher = await connected((params, callback) => asked.push(() => sign(params, callback)));
  await backend.trigger("private-raw-slow", "answer", { message_id: "a", delta: "One " });
  await backend.trigger("private-raw-slow", "stream_end", { message_id: "a" });
  const options = { event: "answer", fields: FIELDS, ends: END, source: pusher };
  const first = mounted(() => useText("private-raw-slow", options));
  await until(() => asked.length);
  await first.leave();
  await until(() => pusher.channel("private-raw-slow").subscriptionCancelled);
  const second = mounted(() => useText("private-raw-slow", options));
  await act(async () => asked.splice(0).forEach((answer) => answer()));
  await rendered(() => second.now().caughtUp);
  assert.deepEqual([second.now().text, second.now().state], ["One ", "done"]);
  assert.ok(pusher.position("private-raw-slow"));
  await second.leave();
  pusher.disconnect();
}

// A component asks again for a channel that was refused to an earlier one.
async function askedAgain() {
  let isOpen = false;
  const pusher = await connected(async (params, callback) => {
    await turn();
    if (isOpen) sign(params, callback);
    else callback(new Error("closed"), null);
  });
  const first = mounted(() => useChannel("private-door", {}, { source: pusher }));
  await rendered(() => first.now().status === "failed");
  isOpen = true;
  const second = mounted(() => useChannel("private-door", {}, { source: pusher }));
  await rendered(() => first.now().status === "subscribed" && second.now().status === "subscribed");
  assert.equal(first.now().error, null);
  await first.leave();
  await second.leave();
  pusher.disconnect();
}

// So it does for one that the server refused, also if nobody waited any more for what the server says.
async function askedAgainOfTheServer() {
  const asked = [];
  const pusher = await connected((params, callback) => asked.push([() => sign(params, callback), () => callback(null, { auth: WRONG })]));
  const [right, wrong] = [0, 1].map((which) => () => until(() => asked.length).then(() => asked.shift()[which]()));
  const use = () => useChannel("private-gate", {}, { source: pusher });
  const first = mounted(use);
  await wrong();
  await rendered(() => first.now().status === "failed");
  const second = mounted(use);
  await right();
  await rendered(() => first.now().status === "subscribed" && second.now().status === "subscribed");
  await first.leave();
  await second.leave();
  await until(() => !pusher.channel("private-gate"));

  const third = mounted(use);
  await third.leave();
  await until(() => pusher.channel("private-gate").subscriptionCancelled);
  await wrong();
  await until(() => !pusher.channel("private-gate"));
  const fourth = mounted(use);
  await right();
  await rendered(() => fourth.now().status === "subscribed");
  await fourth.leave();
  pusher.disconnect();
}

// A channel that the server removed this client from is no longer subscribed to, and its pages of history end.
async function removed() {
  const pusher = await connected();
  const channel = "private-raw-removed";
  const first = mounted(() => useChannel(channel, {}, { source: pusher }));
  await rendered(() => first.now().status === "subscribed");
  const { transport } = pusher.connection.connection;
  const { onMessage } = transport;
  const late = [];
  transport.onMessage = (message) => late.push(message);
  const page = pusher.history(channel);
  // It waits for a page, too.
  const following = redpoll.followTexts(pusher, channel);
  const refused = assert.rejects(page, { message: `not subscribed to channel ${channel}` });
  await until(() => late.length);
  await backend.post({ path: `/channels/${channel}/unsubscribe`, body: { socket_id: pusher.connection.socket_id } });
  const ends = ({ data }) => data.includes("pusher:subscription_error");
  await until(() => late.some(ends));
  transport.onMessage = onMessage;
  // The server drops requests of a channel that it removes the client from.
  for (const message of late) if (!message.data.includes("pusher:history")) transport.onMessage(message);
  await refused;
  await rendered(() => first.now().status === "failed");
  assert.deepEqual([following.view().caughtUp, following.view().error.message], [false, first.now().error.message]);
  following.close();
  const second = mounted(() => [useChannel(channel, {}, { source: pusher }), useText(channel, { source: pusher })]);
  await rendered(() => second.now()[0].status === "failed" && second.now()[1].state === "failed");
  for (const [{ status }] of second.seen) assert.notEqual(status, "subscribed");
  await first.leave();
  await second.leave();
  pusher.disconnect();
}

// A signature for a connection that has ended is nothing for the next one, and refuses nothing. So an answer goes on.
async function signedTooLate(prepare = async () => {}) {
  const asked = [];
  let isSlow = false;
  const pusher = await connected((params, callback) => {
    if (isSlow) asked.push([() => sign(params, callback), () => callback(new Error("aborted"), null)]);
    else sign(params, callback);
  });
  await prepare(pusher);
  const channel = `private-chat-${process.argv[3]}`;
  const fetch = async () => Response.json({ stream: "a" });
  const transport = new RedpollChatTransport({ source: pusher, channel: () => channel, fetch });
  const chunks = [];
  const stream = await transport.sendMessages({ trigger: "submit-message", chatId: "1", messages: [] });
  const reading = (async () => { for await (const chunk of stream) chunks.push(chunk); })();
  const send = (type, more) => backend.trigger(channel, type, { stream: "a", type, ...more });
  await send("start");
  await send("text-start", { id: "t" });
  await send("text-delta", { id: "t", delta: "One " });
  await until(() => chunks.length === 3);
  const errors = [];
  pusher.channel(channel).bind("pusher:subscription_error", (error) => errors.push(error));
  isSlow = true;
  for (let connections = 1; connections < 4; connections += 1) {
    pusher.disconnect();
    pusher.connect();
    await until(() => asked.length === connections);
  }
  const [[signed], [, aborted], [, latest]] = asked;
  signed();
  aborted();
  // The server would have refused the signature by then.
  await until(() => pusher.subscribe("later").subscribed);
  pusher.disconnect();
  latest();
  pusher.connect();
  await until(() => asked.length === 4);
  asked[3][0]();
  await until(() => pusher.channel(channel).subscribed);
  await send("text-delta", { id: "t", delta: "and two." });
  await send("text-end", { id: "t" });
  await send("finish");
  await reading;
  assert.deepEqual(errors, []);
  assert.equal(chunks.at(-1).type, "finish");
  assert.equal(chunks.map(({ delta = "" }) => delta).join(""), "One and two.");
  transport.close();
  pusher.disconnect();
}

// The same after the page moved to another server, for which pusher-js makes its settings again.
async function signedTooLateElsewhere() {
  await signedTooLate(async (pusher) => {
    const { socket_id: former } = pusher.connection;
    pusher.switchCluster({ appKey: key, cluster: "any" });
    await until(() => pusher.connection.state === "connected" && pusher.connection.socket_id !== former);
  });
}

// An authorizer of the page that refuses at once, before a component could listen.
async function refusedAtOnce() {
  const pusher = await connected((params, callback) => callback(new Error("closed"), null));
  const hooks = () => [useChannel("private-door", {}, { source: pusher }), useText("private-raw-door", { source: pusher })];
  const component = mounted(hooks);
  await rendered(() => component.now()[0].status === "failed" && component.now()[1].state === "failed");
  await component.leave();
  pusher.disconnect();
}

// Components leave a channel that the page subscribed to before them as it was.
async function besideThePage() {
  const pusher = await connected();
  const goals = [];
  pusher.subscribe("shared").bind("goal", (data) => goals.push(data));
  const component = mounted(() => useChannel("shared", {}, { source: pusher }));
  await rendered(() => component.now().status === "subscribed");
  await component.leave();
  await turn();
  await backend.trigger("shared", "goal", 1);
  await until(() => goals.length === 1);
  pusher.disconnect();
}

// A component that changes its channel shows nothing of the former one.
async function otherName() {
  const pusher = await connected();
  for (const name of ["a", "b"]) {
    await backend.trigger(`raw-name-${name}`, "answer", { message_id: name, delta: `text of ${name}` });
  }
  const both = (name) => () => {
    const { text, state } = useText(name, { fields: FIELDS, source: pusher });
    const { status, channel } = useChannel(name, {}, { source: pusher });
    return { name, text, state, status, channel: channel && channel.name };
  };
  const component = mounted(both("raw-name-a"));
  await rendered(() => component.now().text === "text of a" && component.now().status === "subscribed");
  await component.show(both("raw-name-b"));
  await rendered(() => component.now().text === "text of b" && component.now().status === "subscribed");
  for (const { name, text, channel } of component.seen) {
    assert.ok(text === "" || text === `text of ${name.at(-1)}`, `${name} shows ${text}`);
    assert.ok(channel === null || channel === name, `${name} has ${channel}`);
  }
  await until(async () => (await subscribers("raw-name-a")) === 0);
  await component.show(both(null));
  assert.deepEqual(component.now(), { name: null, text: "", state: "loading", status: "subscribing", channel: null });
  await until(async () => (await subscribers("raw-name-b")) === 0);
  await component.leave();
  pusher.disconnect();
}

// Components that come while pieces wait to be joined show each piece once, whatever fields the pieces have.
async function inTheMiddle() {
  const pusher = await connected();
  const options = { event: "answer", fields: FIELDS, ends: END };
  for (let round = 0; round < 4; round += 1) {
    const channel = `raw-middle-${round}`;
    const views = [];
    const followings = [redpoll.followTexts(pusher, channel, options, (view) => (views[0] = view))];
    await until(() => views[0]?.caughtUp);
    const sent = { a: "", b: "" };
    for (let number = 0; number < 60; number += 1) {
      const id = number % (round + 1) ? "b" : "a";
      sent[id] += `${number} `;
      await backend.trigger(channel, "answer", { message_id: id, delta: `${number} ` });
      if (number % 10 === 5) {
        const place = followings.length;
        followings.push(redpoll.followTexts(pusher, channel, options, (view) => (views[place] = view)));
      }
    }
    for (const id of ["a", "b"]) await backend.trigger(channel, "stream_end", { message_id: id });
    await until(() => followings.every((_, place) => views[place]?.texts.filter(({ state }) => state === "done").length === 2));
    for (const { texts } of views) {
      const shown = Object.fromEntries(texts.map(({ id, text }) => [id, text]));
      for (const id of ["a", "b"]) assert.equal(shown[id] ?? "", sent[id], `${channel} ${id}`);
    }
    for (const following of followings) following.close();
  }
  pusher.disconnect();
}

// Stored messages of an encrypted channel are opened also where the subscription is shared.
async function encrypted() {
  const pusher = await connected();
  const channel = "private-encrypted-raw";
  await backend.trigger(channel, "answer", { message_id: "a", delta: "One 🐦" });
  const options = { fields: FIELDS, ends: END, event: "answer", source: pusher };
  const component = mounted(() => [useText(channel, options), useText(channel, options)]);
  await rendered(() => component.now().every(({ caughtUp }) => caughtUp));
  await backend.trigger(channel, "answer", { message_id: "a", delta: " and two" });
  await backend.trigger(channel, "stream_end", { message_id: "a" });
  await rendered(() => component.now().every(({ state }) => state === "done"));
  assert.deepEqual(component.now().map(({ text }) => text), ["One 🐦 and two", "One 🐦 and two"]);
  await component.leave();
  pusher.disconnect();
}

// A channel whose history could not be read, because the connection broke once more, is read after the next success.
async function brokenTwice() {
  const pusher = await connected();
  const views = [];
  const options = { event: "answer", fields: FIELDS };
  const following = redpoll.followTexts(pusher, "raw-twice", options, (view) => views.push(view));
  await until(() => views.at(-1)?.caughtUp);
  await backend.trigger("raw-twice", "answer", { message_id: "a", delta: "One " });
  await until(() => views.at(-1).texts.length);
  // As the server says it when it can't continue; the page of the history doesn't come before the connection breaks.
  const history = pusher.history;
  pusher.history = () => Promise.reject(new Error("the connection was lost"));
  pusher.channel("raw-twice").emit("pusher:position", { ...pusher.position("raw-twice"), recovered: false });
  await until(() => views.at(-1).texts[0].state === "incomplete");
  pusher.history = history;
  pusher.disconnect();
  pusher.connect();
  await until(() => views.at(-1).texts[0].state === "streaming");
  assert.equal(views.at(-1).texts[0].text, "One ");
  following.close();
  pusher.disconnect();
}

// A page that leaves a channel and comes back at once shows each piece once: what was on its way comes with the stored ones.
async function backAtOnce() {
  const pusher = await connected();
  const channel = "raw-back";
  let view = null;
  const follow = () => redpoll.followTexts(pusher, channel, { event: "answer", fields: FIELDS }, (next) => (view = next));
  const first = follow();
  await until(() => view?.caughtUp);
  const { transport } = pusher.connection.connection;
  const { onMessage } = transport;
  const late = [];
  transport.onMessage = (message) => late.push(message);
  await backend.trigger(channel, "answer", { message_id: "a", delta: "One " });
  await until(() => late.length === 1);
  first.close();
  await until(() => !pusher.channel(channel));
  const second = follow();
  await until(() => late.some(({ data }) => data.includes("subscription_succeeded")));
  transport.onMessage = onMessage;
  late.forEach((message) => transport.onMessage(message));
  await until(() => view.caughtUp && view.texts.length);
  await backend.trigger(channel, "answer", { message_id: "a", delta: "and two" });
  await until(() => view.texts[0].text.endsWith("two"));
  assert.deepEqual(second.view().texts, [{ id: "a", text: "One and two", state: "streaming" }]);
  second.close();
  pusher.disconnect();
}

const cases = {
  leftBeforeSigned, textLeftBeforeSigned, askedAgain, askedAgainOfTheServer, removed, signedTooLate,
  signedTooLateElsewhere, refusedAtOnce, besideThePage, otherName, inTheMiddle, encrypted, brokenTwice, backAtOnce,
};
await cases[process.argv[3]]();
console.log("ok");
process.exit(0);
