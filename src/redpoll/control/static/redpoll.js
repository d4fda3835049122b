/* redpoll for browsers: history for a stock pusher-js client (8.x). No build step, no dependency.
 *
 *   <script src="https://js.pusher.com/8.6.0/pusher.min.js"></script>
 *   <script src="https://YOUR-SERVER/api/v1/redpoll.js"></script>
 *
 *   const pusher = redpoll(new Pusher(KEY, OPTIONS));    // before the first subscribe; laravel-echo: `client: pusher`
 *   const news = pusher.subscribe("news", { rewind: { count: 20 } });
 *
 * `redpoll(pusher)` gives back the same object, which works as before and does this besides, on channels whose history
 * the app keeps (`redpoll history rule add`):
 *
 * - Recovery. After a lost connection each channel goes on where it stopped: what was missed comes first, oldest first,
 *   to the same handlers, every message once. When the gap cannot be filled, `recovered` is false (below).
 * - `pusher.subscribe(channel, { rewind })`: what came before, as ordinary events behind the success.
 *   `{ count: 20 }`: the last 20 messages, at most 1,000; `{ seconds: 60 }`: those of the last 60 s.
 *   `pusher.subscribe(channel, { since })`: all behind a place, which `pusher.position(channel)` gave earlier, perhaps
 *   before the page was loaded anew. Say either when you subscribe first: once in the channel, nothing more is replayed.
 * - `pusher.history(channel, { limit, before, since })` asks for a page, once the channel is subscribed: a promise of
 *   `{ epoch, messages: [{ offset, event, data, time_ms }], next }`, oldest first. `data` is the text as published.
 *   `limit` is 1 to 1,000, 100 by default. Neither `before` nor `since`: the newest. `next`, unless it is null, is
 *   what to give for the page after: as `since` if you asked with `since`, else as `before`.
 *   Refused, it rejects with the server's sentence; unanswered for 10 s, or with the connection lost, too.
 * - `pusher.position(channel)`: `{ epoch, offset }` of the latest message seen, null where no history is kept.
 * - Event `pusher:position` on the channel, `{ epoch, offset, recovered }`: told with each success on a channel with
 *   history, and when the server lost the history. `recovered` is there after a `since`, so after each reconnect:
 *   false means that messages are missing, and that what follows lies behind this place. Load anew what you show then.
 *
 * For Node: `const redpoll = require("./redpoll.js")`, or `import`.
 */
(function (root, redpoll) {
  if (typeof module === "object" && module.exports) module.exports = redpoll;
  else root.redpoll = redpoll;
})(typeof self === "undefined" ? globalThis : self, function redpoll(pusher) {
  "use strict";
  const ANSWERED_WITHIN_MS = 10000;
  const SUCCEEDED = "pusher_internal:subscription_succeeded";

  if (pusher.redpoll) return pusher;
  pusher.redpoll = true;

  // By channel. `wanted`: what to ask for when we have no place to go on from. `place`: the latest we know of.
  // `asked`: promises of pages. Of these the first alone is sent: an answer does not say to which question, and a refusal
  // comes sooner than a page that was asked for before.
  const channels = new Map();

  function known(name) {
    if (!channels.has(name)) channels.set(name, { wanted: {}, place: null, asked: [] });
    return channels.get(name);
  }

  // -- what is sent

  const stock = { send_event: pusher.send_event, subscribe: pusher.subscribe, unsubscribe: pusher.unsubscribe };

  pusher.send_event = function (event, data, channel) {
    if (event === "pusher:subscribe") {
      const { wanted, place } = known(data.channel);
      // JSON leaves out what is undefined.
      data = { ...data, recover: true, since: place || wanted.since, rewind: place ? undefined : wanted.rewind };
    }
    return stock.send_event.call(pusher, event, data, channel);
  };

  pusher.subscribe = function (name, wanted) {
    if (wanted) known(name).wanted = wanted.since ? { since: wanted.since } : { rewind: wanted.rewind };
    return stock.subscribe.call(pusher, name);
  };

  // Who leaves on purpose begins anew when he comes back.
  pusher.unsubscribe = function (name) {
    const left = channels.get(name);
    channels.delete(name);
    if (left) refuse(left, `unsubscribed from channel ${name}`);
    return stock.unsubscribe.call(pusher, name);
  };

  pusher.position = function (name) {
    const { place } = channels.get(name) || { place: null };
    return place && { ...place };
  };

  pusher.history = function (name, { limit, before, since } = {}) {
    return new Promise((resolve, reject) => {
      const channel = known(name);
      const question = { resolve, reject, data: { channel: name, limit, before, since } };
      question.timer = setTimeout(() => {
        // The first has its turn until its answer is here, however late.
        if (channel.asked[0] !== question) channel.asked.splice(channel.asked.indexOf(question), 1);
        reject(new Error(`no history of channel ${name}: not answered within ${ANSWERED_WITHIN_MS / 1000} s`));
      }, ANSWERED_WITHIN_MS);
      if (channel.asked.push(question) === 1) ask(channel);
    });
  };

  function ask(channel) {
    if (!pusher.send_event("pusher:history", channel.asked[0].data)) refuse(channel, "not connected");
  }

  function settle(channel, how, what) {
    const question = channel.asked.shift();
    if (!question) return;
    clearTimeout(question.timer);
    question[how](what);
    if (channel.asked.length) ask(channel);
  }

  function refuse(channel, why) {
    for (const question of channel.asked.splice(0)) {
      clearTimeout(question.timer);
      question.reject(new Error(why));
    }
  }

  // -- what is received: pusher-js drops the members of a frame that it doesn't know, so we look before it does

  function look(text) {
    let frame;
    try {
      frame = JSON.parse(text);
      if (frame.event === "pusher:error") return refused(frame.data.message);
      const channel = channels.get(frame.channel);
      if (!channel) return null;
      if (frame.offset) {
        if (channel.place) channel.place.offset = frame.offset;
      } else if (frame.event === SUCCEEDED || frame.event === "pusher:position") {
        const { epoch, offset, recovered } = JSON.parse(frame.data);
        channel.place = epoch === undefined ? null : { epoch, offset };
        if (frame.event === SUCCEEDED && (epoch || recovered === false)) return { name: frame.channel, told: { epoch, offset, recovered } };
      } else if (frame.event === "pusher:history") {
        settle(channel, "resolve", JSON.parse(frame.data));
      }
    } catch {
      // Not ours to complain about: pusher-js gets the same text.
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
      if (channel) channel.emit("pusher:position", success.told);
      return result;
    };
  }

  pusher.connection.bind("connected", tap);
  pusher.connection.bind("state_change", ({ previous }) => {
    if (previous === "connected") channels.forEach((channel) => refuse(channel, "the connection was lost"));
  });
  tap();
  return pusher;
});
