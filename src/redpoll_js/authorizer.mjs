// One request of a page for the signatures of several channels. index.mjs documents it.

const COLLECTED_FOR_MS = 15;
const MAX_CHANNELS = 100;
const SIGNED_WITHIN_MS = 10000;

export function authorizer(options) {
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
