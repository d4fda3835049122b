/* redpoll for browsers: history, recovery and growing texts for a stock pusher-js client (8.x). No dependency.
 *
 *   <script src="https://js.pusher.com/8.6.0/pusher.min.js"></script>
 *   <script src="https://YOUR-SERVER/api/v1/redpoll.js"></script>
 *
 *   const pusher = redpoll(new Pusher(KEY, OPTIONS));    // before the first subscribe; laravel-echo: `client: pusher`
 *   const news = pusher.subscribe("news", { rewind: { count: 20 } });
 *
 * `redpoll(pusher)` returns the same object. It works as before, and adds the following on channels whose messages the
 * app stores (`redpoll history rule add`):
 *
 * - Recovery. After a lost connection, each channel continues where it stopped: the same handlers get every missed
 *   message once, oldest first, before new ones. If messages can't be recovered, `recovered` is false (see below).
 * - `pusher.subscribe(channel, { rewind })` replays earlier messages as ordinary events after the success event.
 *   `{ count: 20 }`: the last 20 messages, at most 1,000. `{ seconds: 60 }`: the messages of the last 60 s.
 *   `pusher.subscribe(channel, { since })` replays all messages after a position that `pusher.position(channel)`
 *   returned earlier, for example before the page was reloaded. Pass these with the first subscribe: a channel that is
 *   subscribed already replays nothing.
 * - `pusher.history(channel, { limit, before, since })` requests a page of stored messages of a subscribed channel. It
 *   returns a promise of `{ epoch, messages: [{ offset, event, data, time_ms }], next }`, oldest first. `data` is the
 *   text as it was published. `limit` is 1 to 1,000, by default 100. Without `before` and `since` you get the newest
 *   messages. To get the next page, pass `next` as `since` if you passed `since`, otherwise as `before`. `next` is null
 *   on the last page. The promise rejects with the server's error text if the server refuses, if no answer comes
 *   within 10 s, or if the connection is lost.
 * - `pusher.position(channel)` returns `{ epoch, offset }` of the latest message, or null if the channel stores none.
 * - The event `pusher:position` on the channel has `{ epoch, offset, recovered }`. It comes with each success on a
 *   channel with history, and when the server lost the history. `recovered` is set if the subscribe had a `since`, so
 *   after each reconnect. False means that messages are missing before this position: reload what the page shows.
 *
 * `redpoll.authorizer({ endpoint, headers, params })` is for pages whose back end signs each channel: it asks for all
 * channels of 15 ms in one request, which are all of them after a reconnect. It works without `redpoll(pusher)`:
 *
 *   new Pusher(KEY, { ...OPTIONS, channelAuthorization: { customHandler: redpoll.authorizer({ endpoint: "/auth" }) } });
 *
 * The request is a form with `socket_id` and `channel_name[]`, at most 100; `headers` and `params` (objects, or functions
 * that return one) are added. The answer is `{ NAME: { status: 200, data: { auth, … } } }`, as pusher-js-auth has it.
 *
 * `redpoll.followTexts(pusher, channel, options, changed)` joins texts that come in parts, as `publish_stream` of
 * redpoll-client sends them, or a back end that names other fields:
 *
 *   const following = redpoll.followTexts(pusher, "answers", { event: "answer" }, ({ texts }) => show(texts));
 *   following.close();
 *
 * Each text is `{ id, text, state }`. The state is `streaming`, `done`, `failed`, `cancelled`, or `incomplete`: a part is
 * missing. A page that comes late, or back, gets the text from its beginning, as far as it is stored. A text of which
 * nothing comes for 30 s (`silenceMs`) is `failed`. Instead of a client, `redpoll.streamSource({ server, app, token })`
 * reads the channel over HTTP.
 *
 * For Node: `const redpoll = require("./redpoll.js")`, or `import`. As a package with types and hooks for React:
 * redpoll-js.
 */
(function (root, make) {
  if (typeof module === "object" && module.exports) module.exports = make();
  else root.redpoll = make();
})(typeof self === "undefined" ? globalThis : self, function () {
"use strict";

// One request of a page for the signatures of several channels. index.mjs documents it.

const COLLECTED_FOR_MS = 15;
const MAX_CHANNELS = 100;
const SIGNED_WITHIN_MS = 10000;

function authorizer(options) {
  const { endpoint, headers, params } = options;
  // By socket id: the callbacks of each channel that is to be asked for.
  const waiting = new Map();

  const valueOf = (option) => (typeof option === "function" ? option() : option) || {};

  async function ask(socketId, channels) {
    let answers = {};
    let fault = null;
    const patience = new AbortController();
    const timer = setTimeout(() => patience.abort(), SIGNED_WITHIN_MS);
    try {
      const form = new URLSearchParams([["socket_id", socketId], ...Object.entries(valueOf(params))]);
      for (const name of channels.keys()) form.append("channel_name[]", name);
      const request = { method: "POST", body: form, credentials: "same-origin", signal: patience.signal };
      const response = await fetch(endpoint, { ...request, headers: valueOf(headers) });
      if (!response.ok) throw new Error(`${endpoint} answered ${response.status}`);
      answers = (await response.json()) || {};
    } catch (error) {
      fault = error.name === "AbortError" ? new Error(`${endpoint} didn't answer in time`) : error;
    }
    clearTimeout(timer);
    for (const [name, callbacks] of channels) {
      const { status, data } = (Object.hasOwn(answers, name) && answers[name]) || {};
      const signed = status === 200 && data && typeof data.auth === "string";
      const refusal = fault || new Error(`${endpoint} didn't sign ${name}: ${status || "it isn't in the answer"}`);
      // A copy: pusher-js deletes the shared_secret of what it gets. In a turn of its own: a page's handler may throw.
      for (const callback of callbacks) setTimeout(callback, 0, signed ? null : refusal, signed ? { ...data } : null);
    }
  }

  function send(socketId) {
    const channels = waiting.get(socketId);
    waiting.delete(socketId);
    ask(socketId, channels);
  }

  return function ({ socketId, channelName }, callback) {
    let channels = waiting.get(socketId);
    if (!channels) {
      waiting.set(socketId, (channels = new Map()));
      channels.timer = setTimeout(send, COLLECTED_FOR_MS, socketId);
    }
    if (!channels.has(channelName)) channels.set(channelName, []);
    channels.get(channelName).push(callback);
    if (channels.size >= MAX_CHANNELS) {
      clearTimeout(channels.timer);
      send(socketId);
    }
  };
}

// History and recovery around a stock pusher-js client. index.mjs documents what it adds.

const HISTORY_WITHIN_MS = 10000;
const SUCCEEDED = "pusher_internal:subscription_succeeded";

function redpoll(pusher) {
  if (pusher.redpoll) return pusher;
  pusher.redpoll = true;

  // By channel name. `wanted`: what to request while no position is known. `position`: the latest one known.
  // `requests`: pending requests for pages. Only the first of them has been sent, because an answer doesn't say which request it is
  // for, and a refusal can come before the page of an earlier request.
  const channels = new Map();

  function known(name) {
    if (!channels.has(name)) channels.set(name, { wanted: {}, position: null, requests: [] });
    return channels.get(name);
  }

  // -- what is sent

  const { send_event, subscribe, unsubscribe, switchCluster } = pusher;
  const stock = { send_event, subscribe, unsubscribe, switchCluster };

  pusher.send_event = function (event, data, channel) {
    if (event === "pusher:subscribe") {
      const { wanted, position } = known(data.channel);
      // JSON.stringify leaves out undefined members.
      data = { ...data, recover: true, since: position || wanted.since, rewind: position ? undefined : wanted.rewind };
    }
    return stock.send_event.call(pusher, event, data, channel);
  };

  pusher.subscribe = function (name, wanted) {
    const channel = known(name);
    if (wanted) channel.wanted = wanted.since ? { since: wanted.since } : { rewind: wanted.rewind };
    return stock.subscribe.call(pusher, name);
  };

  // After an unsubscribe, the next subscribe starts without a position.
  pusher.unsubscribe = function (name) {
    const channel = channels.get(name);
    channels.delete(name);
    if (channel) refuse(channel, `unsubscribed from channel ${name}`);
    return stock.unsubscribe.call(pusher, name);
  };

  pusher.position = function (name) {
    const { position } = channels.get(name) || { position: null };
    return position && { ...position };
  };

  pusher.history = function (name, { limit, before, since } = {}) {
    return new Promise((resolve, reject) => {
      const channel = known(name);
      const request = { resolve, reject, data: { channel: name, limit, before, since } };
      request.timer = setTimeout(() => {
        // The first request stays until its answer comes, even if that is late.
        if (channel.requests[0] !== request) channel.requests.splice(channel.requests.indexOf(request), 1);
        reject(new Error(`no history of channel ${name}: not answered within ${HISTORY_WITHIN_MS / 1000} s`));
      }, HISTORY_WITHIN_MS);
      if (channel.requests.push(request) === 1) ask(channel);
    });
  };

  function ask(channel) {
    if (!pusher.send_event("pusher:history", channel.requests[0].data)) refuse(channel, "not connected");
  }

  function settle(channel, outcome, value) {
    const request = channel.requests.shift();
    if (!request) return;
    clearTimeout(request.timer);
    request[outcome](value);
    if (channel.requests.length) ask(channel);
  }

  function refuse(channel, reason) {
    for (const request of channel.requests.splice(0)) {
      clearTimeout(request.timer);
      request.reject(new Error(reason));
    }
  }

  // -- what pages' authorizers answer

  // A signature is for one connection, and the server refuses it on the next one, which asks by itself. A request that
  // failed with its connection is no refusal either.
  function guardSignatures() {
    const { channelAuthorizer } = pusher.config;
    pusher.config.channelAuthorizer = function (asked, answer) {
      return channelAuthorizer.call(this, asked, (...signed) => {
        const { state, socket_id: socketId } = pusher.connection;
        if (state === "connected" && socketId === asked.socketId) answer(...signed);
      });
    };
  }

  // This method replaces `pusher.config`. pusher-js before 8.5 doesn't have it.
  if (stock.switchCluster) {
    pusher.switchCluster = function (options) {
      stock.switchCluster.call(pusher, options);
      guardSignatures();
    };
  }

  // -- what is received: pusher-js drops members of a frame that it doesn't know, so this reads the frame first

  function look(text) {
    let frame;
    try {
      frame = JSON.parse(text);
      if (frame.event === "pusher:error") return refused(frame.data.message);
      if (frame.event === "pusher:subscription_error") return turnedAway(frame.channel);
      const channel = channels.get(frame.channel);
      if (!channel) return null;
      if (isEarly(frame, channel)) return { isEarly: true };
      if (frame.offset) {
        if (channel.position) channel.position.offset = frame.offset;
      } else if (frame.event === SUCCEEDED || frame.event === "pusher:position") {
        const { epoch, offset, recovered } = JSON.parse(frame.data);
        channel.position = epoch === undefined ? null : { epoch, offset };
        if (frame.event === SUCCEEDED && (epoch || recovered === false)) {
          return { name: frame.channel, position: { epoch, offset, recovered } };
        }
      } else if (frame.event === "pusher:history") {
        settle(channel, "resolve", JSON.parse(frame.data));
      }
    } catch {
      // pusher-js gets the same text and reports the error.
    }
    return null;
  }

  // Of an earlier subscription to the channel on this connection: what is stored comes once more after the success.
  function isEarly({ event, channel: name, offset }, { wanted, position }) {
    const asks = position || wanted.since || wanted.rewind;
    const { subscribed } = pusher.channel(name) || {};
    return Boolean(asks && !subscribed && (offset || event === "pusher:position"));
  }

  function refused(message) {
    for (const [name, channel] of channels) {
      if (message.startsWith(`No history of channel ${name}: `)) settle(channel, "reject", new Error(message));
    }
    return null;
  }

  // The server refused a subscribe, or ended the subscription and dropped its requests. pusher-js would leave the channel
  // pending, or subscribed, and never ask for it again.
  function turnedAway(name) {
    if (channels.has(name)) refuse(channels.get(name), `not subscribed to channel ${name}`);
    const channel = pusher.channel(name);
    if (channel) channel.disconnect();
    if (channel && channel.subscriptionCancelled) pusher.unsubscribe(name);
    return null;
  }

  function tap() {
    const transport = pusher.connection.connection && pusher.connection.connection.transport;
    if (!transport || transport.redpoll) return;
    transport.redpoll = true;
    const emit = transport.emit;
    transport.emit = function (event, data, ...more) {
      const seen = event === "message" ? look(data.data) : null;
      if (seen && seen.isEarly) return transport;
      const result = emit.call(transport, event, data, ...more);
      const channel = seen && pusher.channel(seen.name);
      if (channel) channel.emit("pusher:position", seen.position);
      return result;
    };
  }

  pusher.connection.bind("connected", tap);
  pusher.connection.bind("state_change", ({ previous }) => {
    if (previous === "connected") channels.forEach((channel) => refuse(channel, "the connection was lost"));
  });
  guardSignatures();
  tap();
  return pusher;
}

// Texts that arrive in parts: joined by their place, and marked where a part is missing. No I/O but timers.

// What `publish_stream` of redpoll-client sends. Each name may be a path with dots, as in a rule's `--join`.
const PUBLISH_STREAM = { id: "stream", delta: "delta", number: "n", length: "length", state: "state" };
const STATES = ["done", "failed", "cancelled"];
const SILENT_AFTER_MS = 30000;

const at = (data, path) => path.split(".").reduce((value, name) => (value == null ? undefined : value[name]), data);

// The texts of one channel, by id. `fields`: where the parts have what; `ends`: the state that an event of a name means.
class Texts {
  constructor({ fields = {}, ends = {} } = {}) {
    this.fields = { ...PUBLISH_STREAM, ...fields };
    this.ends = ends;
    this.texts = new Map();
  }

  // Takes an event in. `joined`: the server may have joined parts, and none is lost, so numbers may skip.
  // Returns the id of the text that it changed, or null.
  take(event, data, joined) {
    const { fields } = this;
    const id = at(data, fields.id);
    if (typeof id !== "string" && typeof id !== "number") return null;
    const delta = at(data, fields.delta);
    const named = Object.hasOwn(this.ends, event) ? this.ends[event] : at(data, fields.state);
    const state = STATES.includes(named) ? named : null;
    if (typeof delta !== "string" && !state) return null;
    const key = String(id);
    const text = this.texts.get(key) || { text: "", state: "streaming", length: 0, number: -1, missing: false };
    const part = { delta: typeof delta === "string" ? delta : "", state };
    part.number = at(data, fields.number);
    part.length = at(data, fields.length);
    const changed = add(text, part, joined);
    this.texts.set(key, text);
    return changed ? key : null;
  }

  // Parts of the texts that have no end yet are missing.
  gap() {
    for (const text of this.texts.values()) if (text.state === "streaming") text.missing = true;
  }

  // A text has no end yet, and none will come.
  fail(id, reason) {
    const text = this.texts.get(id);
    if (text && text.state === "streaming") Object.assign(text, { state: "failed", reason });
  }

  // What a page shows, in the order in which the texts began.
  list() {
    return Array.from(this.texts, ([id, text]) => {
      const cut = text.missing && (text.state === "streaming" || text.state === "done");
      const shown = { id, text: text.text, state: cut ? "incomplete" : text.state };
      return text.reason ? { ...shown, reason: text.reason } : shown;
    });
  }

  // Whether a text has no end yet.
  isOpen(id) {
    const text = this.texts.get(id);
    return text !== undefined && text.state === "streaming";
  }
}

// Adds a part to a text; false if it has nothing new. `length` is that of the text up to the end of the part, in UTF-16
// units, so the part's beginning is known, also of one that the server joined.
function add(text, part, joined) {
  const { delta, state } = part;
  let fresh = delta;
  if (Number.isInteger(part.length)) {
    const start = part.length - delta.length;
    if (start > text.length) text.missing = true;
    else fresh = delta.slice(text.length - start);
    text.length = Math.max(text.length, part.length);
  } else if (Number.isInteger(part.number)) {
    if (part.number <= text.number) return false;
    if (part.number !== text.number + 1 && !joined) text.missing = true;
    text.length += delta.length;
  }
  if (Number.isInteger(part.number)) text.number = Math.max(text.number, part.number);
  if (fresh) text.text += fresh;
  if (!fresh && !state) return false;
  if (text.reason) {
    // It was given up, and goes on.
    text.state = "streaming";
    delete text.reason;
  }
  if (state && text.state === "streaming") text.state = state;
  return true;
}

// Calls `silent(id)` when nothing came for an open text for so long. Time without a connection doesn't count.
class Silence {
  constructor(silent, afterMs = SILENT_AFTER_MS) {
    this.silent = silent;
    this.afterMs = afterMs;
    this.timers = new Map();
    this.connected = false;
  }

  // Something came for this text, and it is open or not.
  heard(id, isOpen) {
    clearTimeout(this.timers.get(id));
    if (!isOpen) this.timers.delete(id);
    else this.timers.set(id, this.connected ? this.started(id) : null);
  }

  started(id) {
    if (!Number.isFinite(this.afterMs)) return null;
    return setTimeout(() => {
      this.timers.delete(id);
      this.silent(id);
    }, this.afterMs);
  }

  // A source may report the same state more than once: the time that has passed goes on.
  connection(connected) {
    if (connected === this.connected) return;
    this.connected = connected;
    for (const [id, timer] of this.timers) {
      clearTimeout(timer);
      this.timers.set(id, connected ? this.started(id) : null);
    }
  }

  clear() {
    for (const timer of this.timers.values()) clearTimeout(timer);
    this.timers.clear();
  }
}

// Where a channel's messages come from: a pusher-js client that `redpoll` wrapped, or GET /apps/ID/channels/NAME/stream.
// Both have `follow(channel, listener)`, which returns a function that ends it. A listener has
//   message(event, data, joined)  each message once, in order; `joined`: parts may have been joined, none is missing
//   caughtUp()     everything that was stored has come
//   connection(connected)
//   gap()          messages before this point are missing
//   restart()      the stored messages follow once more, from the first
//   failed(error)  nothing more will come

const REWOUND = 1000;
const MAX_PAGES = 50;
const CAUGHT_UP_WITHIN_MS = 10000;
const ALIVE_WITHIN_MS = 45000;
const FIRST_WAIT_MS = 250;
const LONGEST_WAIT_MS = 5000;
// Statuses that are final even without the server's code: asking again changes nothing.
const FINAL_STATUSES = [400, 401, 403];

// A source, or a pusher-js client as one.
function sourceOf(source) {
  return typeof source.follow === "function" ? source : pusherSource(source);
}

// Whether another subscriber sent this event, and not the back end: anybody who may read a channel may send such events.
function isOfClient(event) {
  return event.startsWith("client-");
}

// -- pusher-js

// By client, then by channel: how many use the channel, and whether it is to be left after the last.
const holdings = new WeakMap();

// pusher-js keeps a channel that was left before it was subscribed to, until the server answers.
function isUsed(channel) {
  return Boolean(channel) && !channel.subscriptionCancelled;
}

// Subscribes, or shares the subscription that is there.
function hold(pusher, name, wanted) {
  if (!holdings.has(pusher)) holdings.set(pusher, new Map());
  const held = holdings.get(pusher);
  const present = pusher.channel(name);
  const holding = held.get(name) || { count: 0, ours: !isUsed(present) };
  holding.count += 1;
  held.set(name, holding);
  // A channel that is there may have been left meanwhile, or refused: this asks again.
  return pusher.subscribe(name, present ? undefined : wanted);
}

// A page's authorizer may refuse at once, before anything could be bound to the channel.
function isRefused(pusher, channel) {
  return pusher.connection.state === "connected" && !channel.subscribed && !channel.subscriptionPending;
}

// Leaves the channel if nobody uses it. Later: React mounts twice in its strict mode, and pages change their parts.
function release(pusher, name) {
  const held = holdings.get(pusher);
  held.get(name).count -= 1;
  setTimeout(() => {
    const holding = held.get(name);
    if (!holding || holding.count) return;
    held.delete(name);
    if (holding.ours) pusher.unsubscribe(name);
  }, 0);
}

function textOrJson(data) {
  if (typeof data !== "string") return data;
  try {
    return JSON.parse(data);
  } catch {
    return data;
  }
}

function pusherSource(pusher) {
  if (!pusher.redpoll) throw new TypeError("wrap the client: redpoll(new Pusher(…))");
  return { follow: (name, listener) => followPusher(pusher, name, listener) };
}

function followPusher(pusher, name, listener) {
  // The first subscribe brings the stored messages as events, joined by the channel's rule. A subscription that is there
  // already brings nothing, so pages of the history are read.
  const isFirst = !pusher.channel(name);
  const channel = hold(pusher, name, { rewind: { count: REWOUND } });
  let closed = false;
  let caughtUp = false;
  let loading = false;
  // Whether the stored messages are to be read: they don't come as events, or some didn't.
  let isUnread = !isFirst;
  // While pages are read: what comes meanwhile, with its offset. Only stored messages have one of their own.
  let waiting = [];
  // The offset up to which everything is to come before the listener has caught up.
  let awaited = null;

  const offset = () => (pusher.position(name) || { offset: 0 }).offset;

  function setCaughtUp() {
    awaited = null;
    if (caughtUp || closed) return;
    caughtUp = true;
    listener.caughtUp();
  }

  function deliver(event, data) {
    listener.message(event, data, pusher.position(name) !== null);
    if (awaited !== null && offset() >= awaited) setCaughtUp();
  }

  function heard(event, data) {
    if (event === "pusher:subscription_succeeded") succeeded();
    else if (event === "pusher:subscription_error") listener.failed(refusal(data));
    else if (event === "pusher:position" && data.recovered === false) lost();
    else if (!event.startsWith("pusher:")) {
      if (loading) waiting.push({ event, data, offset: offset() });
      else deliver(event, data);
    }
  }

  function succeeded() {
    listener.connection(true);
    if (!pusher.position(name)) setCaughtUp();
    else if (isUnread && caughtUp) lost();
    else if (isUnread) load();
    else if (!caughtUp) awaitNewest();
  }

  // The success frame names the offset after which the stored messages begin. This finds the one with which they end.
  async function awaitNewest() {
    try {
      const { messages } = await pusher.history(name, { limit: 1 });
      const newest = messages.length ? messages[messages.length - 1].offset : 0;
      if (closed || caughtUp) return;
      if (offset() >= newest) return setCaughtUp();
      awaited = newest;
      // A message that excludes this socket doesn't come.
      setTimeout(() => awaited === newest && setCaughtUp(), CAUGHT_UP_WITHIN_MS);
    } catch {
      // Without a subscription the next success asks again.
      if (!closed && channel.subscribed) setCaughtUp();
    }
  }

  function lost() {
    listener.gap();
    load();
  }

  async function load() {
    isUnread = true;
    if (loading) return;
    loading = true;
    let messages = null;
    // The position up to which stored messages count.
    let end = 0;
    while (isUnread && !closed) {
      isUnread = false;
      end = offset();
      waiting = [];
      try {
        messages = await storedMessages(pusher, channel);
      } catch {
        // The next success reads them.
        messages = null;
        isUnread = true;
        break;
      }
    }
    loading = false;
    if (closed) return;
    const late = waiting;
    waiting = [];
    if (messages) {
      // A live event may have been joined of parts that are among the stored ones. It has no part from before the event
      // that came before it, so what is stored counts up to where one of them ended.
      const newest = messages.length ? messages[messages.length - 1].offset : 0;
      for (const message of late) if (message.offset <= newest) end = message.offset;
      listener.restart();
      for (const { event, data, offset: at } of messages) if (at <= end) listener.message(event, data, false);
    }
    for (const message of late) if (!messages || message.offset > end) listener.message(message.event, message.data, true);
    if (messages || channel.subscribed) setCaughtUp();
  }

  const changed = ({ current }) => listener.connection(current === "connected" && channel.subscribed);
  channel.bind_global(heard);
  pusher.connection.bind("state_change", changed);
  if (channel.subscribed) succeeded();
  else if (isRefused(pusher, channel)) listener.failed(refusal());

  return () => {
    if (closed) return;
    closed = true;
    channel.unbind_global(heard);
    pusher.connection.unbind("state_change", changed);
    release(pusher, name);
  };
}

// All stored messages of a subscribed channel, oldest first, as handlers would get them.
async function storedMessages(pusher, channel) {
  let messages = [];
  let before;
  for (let pages = 0; pages < MAX_PAGES; pages += 1) {
    const page = await pusher.history(channel.name, { limit: 1000, before });
    messages = [...page.messages, ...messages];
    before = page.next;
    if (!before) break;
  }
  const open = channel.key && channel.nacl ? (data) => decrypted(channel, data) : textOrJson;
  return messages.map(({ offset, event, data }) => ({ offset, event, data: open(data) }));
}

// What an encrypted channel's data says; undefined if the channel's key doesn't open it.
function decrypted({ key, nacl }, data) {
  const bytesOf = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  try {
    const { nonce, ciphertext } = JSON.parse(data);
    return textOrJson(new TextDecoder().decode(nacl.secretbox.open(bytesOf(ciphertext), bytesOf(nonce), key)));
  } catch {
    return undefined;
  }
}

function refusal(data) {
  return new Error((data && (data.error || data.message)) || "the subscription was refused");
}

// -- HTTP

// Reads channels over HTTP. `server`: its URL; `app`: the app's id; `token`: a token of scope read, or a function of the
// channel that returns one, also as a promise.
function streamSource(options) {
  return { stream: options, follow: (name, listener) => followStream(options, name, listener) };
}

// Whether an address that has worked may work again. A proxy answers while the server is away; the server's own refusals
// have a code. 408, also the server's, means that the request came too slowly.
function mayHeal(status, text) {
  if (status === 408) return true;
  const refused = textOrJson(text);
  const isOwn = typeof refused === "object" && refused !== null && typeof refused.code === "string";
  return !isOwn && !FINAL_STATUSES.includes(status);
}

function followStream({ server, app, token, fetch: ask = (...request) => fetch(...request) }, name, listener) {
  const address = `${String(server).replace(/\/$/, "")}/apps/${app}/channels/${encodeURIComponent(name)}/stream`;
  const ending = new AbortController();
  const { signal } = ending;
  let position = "-1";
  let caughtUp = false;
  let waitMs = FIRST_WAIT_MS;
  let closed = false;
  let hasWorked = false;
  let cursor = null;
  // Messages whose position hasn't come yet. If it doesn't come, the next answer has them again.
  let pending = [];

  function take(event, data) {
    if (event === "data") pending = [...pending, ...JSON.parse(data)];
    if (event !== "control") return;
    const control = JSON.parse(data);
    const messages = pending;
    pending = [];
    for (const message of messages) {
      if (signal.aborted) return;
      listener.message(message.event, textOrJson(message.data), false);
    }
    position = control.streamNextOffset;
    cursor = control.streamCursor || cursor;
    waitMs = FIRST_WAIT_MS;
    if (control.upToDate && !caughtUp) {
      caughtUp = true;
      listener.caughtUp();
    }
    closed = control.streamClosed === true;
  }

  // One answer, to its end. Returns how long to wait before the next request, in ms; null if there is none.
  async function read() {
    const query = new URLSearchParams({ offset: position, live: "sse", ...(cursor && { cursor }) });
    let isStream = false;
    pending = [];
    const bearer = typeof token === "function" ? await token(name) : token;
    const alive = new AbortController();
    const stop = () => alive.abort();
    signal.addEventListener("abort", stop);
    let timer = setTimeout(stop, ALIVE_WITHIN_MS);
    try {
      const answer = await ask(`${address}?${query}`, {
        headers: bearer ? { Authorization: `Bearer ${bearer}` } : {},
        signal: alive.signal,
        cache: "no-store",
      });
      if (answer.status === 410) {
        position = "-1";
        listener.gap();
        listener.restart();
        return FIRST_WAIT_MS;
      }
      if (answer.status === 429 || answer.status >= 500) {
        return Math.max(waitMs, 1000 * (Number(answer.headers.get("Retry-After")) || 0));
      }
      if (!answer.ok) {
        const text = await answer.text();
        if (hasWorked && mayHeal(answer.status, text)) return waitMs;
        listener.failed(new Error(`${address} answered ${answer.status}: ${text}`));
        return null;
      }
      listener.connection(true);
      for await (const [event, data] of eventsOf(answer.body)) {
        clearTimeout(timer);
        timer = setTimeout(stop, ALIVE_WITHIN_MS);
        if (event) take(event, data);
        if (signal.aborted || closed) return null;
        isStream ||= event === "control";
        hasWorked ||= isStream;
      }
      // Something else that answers, such as a proxy's page, isn't asked again at once.
      return isStream ? 0 : waitMs;
    } finally {
      clearTimeout(timer);
      signal.removeEventListener("abort", stop);
      alive.abort();
    }
  }

  async function run() {
    while (!signal.aborted) {
      let pauseMs = waitMs;
      try {
        pauseMs = await read();
      } catch {
        // The connection broke. The position is where to go on.
      }
      if (pauseMs === null || signal.aborted) return;
      if (pauseMs) {
        listener.connection(false);
        waitMs = Math.min(2 * waitMs, LONGEST_WAIT_MS);
        await new Promise((resolve) => setTimeout(resolve, pauseMs * (0.5 + Math.random() / 2)));
      }
    }
  }

  run();
  return () => ending.abort();
}

// The events of a text/event-stream, as [event, data]; a comment as ["", ""].
async function* eventsOf(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + decoder.decode(value, { stream: true })).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        let event = "";
        const data = [];
        for (const line of block.split(/\r?\n/)) {
          // `s`: without it, `.` excludes U+2028 and U+2029, which don't end a line here.
          const [, field, text] = /^([^:]*):? ?(.*)$/s.exec(line);
          if (field === "event") event = text;
          else if (field === "data") data.push(text);
        }
        yield [event, data.join("\n")];
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// The texts of a channel, followed over a source until they are closed.

// Calls `changed(view)` with `{ texts, caughtUp, connected, error }` after each change. `options`: `event` (a name, or
// names, of the events that carry parts; by default all but client events), `fields`, `ends`, `silenceMs`.
// Returns `{ view(), close() }`.
function followTexts(source, channel, options = {}, changed = () => {}) {
  const names = [options.event ?? [], Object.keys(options.ends || {})].flat(2);
  const isFollowed = (event) => names.includes(event) || (options.event === undefined && !isOfClient(event));
  let texts = new Texts(options);
  // From before a restart, until they come again.
  let former = [];
  let view = { texts: [], caughtUp: false, connected: false, error: null };
  let isClosed = false;
  let isScheduled = false;

  // Events that come together change the page once.
  function show(more) {
    view = { ...view, ...more, texts: null };
    if (isScheduled) return;
    isScheduled = true;
    queueMicrotask(() => {
      isScheduled = false;
      if (!isClosed) changed(current());
    });
  }

  function current() {
    if (view.texts) return view;
    const present = texts.list();
    const known = new Set(present.map(({ id }) => id));
    view = { ...view, texts: [...former.filter(({ id }) => !known.has(id)), ...present] };
    return view;
  }

  const silence = new Silence((id) => {
    texts.fail(id, "nothing came any more");
    show({});
  }, options.silenceMs);

  const stop = sourceOf(source).follow(channel, {
    message(event, data, joined) {
      if (!isFollowed(event)) return;
      const id = texts.take(event, data, joined);
      if (id === null) return;
      silence.heard(id, texts.isOpen(id));
      show({});
    },
    caughtUp: () => show({ caughtUp: true }),
    connection(connected) {
      if (connected === view.connected) return;
      silence.connection(connected);
      // After a refusal it was asked again, and may be read now.
      show(connected ? { connected, error: null } : { connected });
    },
    gap() {
      texts.gap();
      show({});
    },
    restart() {
      former = current().texts.map((text) => (text.state === "streaming" ? { ...text, state: "incomplete" } : text));
      texts = new Texts(options);
      silence.clear();
      show({});
    },
    failed(error) {
      silence.clear();
      for (const { id } of texts.list()) texts.fail(id, error.message);
      show({ error, connected: false });
    },
  });

  return {
    view: current,
    close() {
      isClosed = true;
      silence.clear();
      stop();
    },
  };
}

Object.assign(redpoll, { authorizer, followTexts, streamSource });

return redpoll;
});
