// History and recovery around a stock pusher-js client. index.mjs documents what it adds.

const HISTORY_WITHIN_MS = 10000;
const SUCCEEDED = "pusher_internal:subscription_succeeded";

export function redpoll(pusher) {
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
