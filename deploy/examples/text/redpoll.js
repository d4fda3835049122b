/* redpoll for browsers: history for a stock pusher-js client (8.x). No build step, no dependency.
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
 * For Node: `const redpoll = require("./redpoll.js")`, or `import`.
 */
(function (root, redpoll, authorizer) {
  redpoll.authorizer = authorizer;
  if (typeof module === "object" && module.exports) module.exports = redpoll;
  else root.redpoll = redpoll;
})(typeof self === "undefined" ? globalThis : self, function redpoll(pusher) {
  "use strict";
  const ANSWERED_WITHIN_MS = 10000;
  const SUCCEEDED = "pusher_internal:subscription_succeeded";

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

  const stock = { send_event: pusher.send_event, subscribe: pusher.subscribe, unsubscribe: pusher.unsubscribe };

  pusher.send_event = function (event, data, channel) {
    if (event === "pusher:subscribe") {
      const { wanted, position } = known(data.channel);
      // JSON.stringify leaves out undefined members.
      data = { ...data, recover: true, since: position || wanted.since, rewind: position ? undefined : wanted.rewind };
    }
    return stock.send_event.call(pusher, event, data, channel);
  };

  pusher.subscribe = function (name, wanted) {
    if (wanted) known(name).wanted = wanted.since ? { since: wanted.since } : { rewind: wanted.rewind };
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
        reject(new Error(`no history of channel ${name}: not answered within ${ANSWERED_WITHIN_MS / 1000} s`));
      }, ANSWERED_WITHIN_MS);
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

  // -- what is received: pusher-js drops members of a frame that it doesn't know, so this reads the frame first

  function look(text) {
    let frame;
    try {
      frame = JSON.parse(text);
      if (frame.event === "pusher:error") return refused(frame.data.message);
      const channel = channels.get(frame.channel);
      if (!channel) return null;
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

  function refused(message) {
    for (const [name, channel] of channels) {
      if (message.startsWith(`No history of channel ${name}: `)) settle(channel, "reject", new Error(message));
    }
    return null;
  }

  function tap() {
    const transport = pusher.connection.connection && pusher.connection.connection.transport;
    if (!transport || transport.redpoll) return;
    transport.redpoll = true;
    const emit = transport.emit;
    transport.emit = function (event, data, ...more) {
      const success = event === "message" ? look(data.data) : null;
      const result = emit.call(transport, event, data, ...more);
      const channel = success && pusher.channel(success.name);
      if (channel) channel.emit("pusher:position", success.position);
      return result;
    };
  }

  pusher.connection.bind("connected", tap);
  pusher.connection.bind("state_change", ({ previous }) => {
    if (previous === "connected") channels.forEach((channel) => refuse(channel, "the connection was lost"));
  });
  tap();
  return pusher;
}, function authorizer(options) {
  "use strict";
  const { endpoint, headers, params } = options;
  const COLLECTED_FOR_MS = 15;
  const MAX_CHANNELS = 100;
  const ANSWERED_WITHIN_MS = 10000;
  // By socket id: the callbacks of each channel that is to be asked for.
  const waiting = new Map();

  const valueOf = (option) => (typeof option === "function" ? option() : option) || {};

  async function ask(socketId, channels) {
    const form = new URLSearchParams([["socket_id", socketId], ...Object.entries(valueOf(params))]);
    for (const name of channels.keys()) form.append("channel_name[]", name);
    let answers = {};
    let fault = null;
    const patience = new AbortController();
    const timer = setTimeout(() => patience.abort(), ANSWERED_WITHIN_MS);
    try {
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
      // A copy: pusher-js deletes the shared_secret of what it gets.
      for (const callback of callbacks) callback(signed ? null : refusal, signed ? { ...data } : null);
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
});
