// Drives the official JavaScript libraries for tests/clients: one command a line on stdin, one answer or event a line
// on stdout, all JSON. It decides nothing and asserts nothing; tests/node.py is the other end.
//
//   in:   {"id": 1, "do": "connect", ...}          out:  {"id": 1, "ok": ...} or {"id": 1, "error": "text"}
//   out, unasked: {"client": "a", "channel": "x", "event": "e", "data": ..., "user_id": ...}
//                 {"client": "a", "state": "connected"}, {"client": "a", "error_code": 4301, "error": "text"}

import { createInterface } from "node:readline";
import Echo from "laravel-echo";
import Pusher from "pusher-js";
import PusherServer from "pusher";

const pushers = new Map();
const echoes = new Map();
const echoChannels = new Map();
const servers = new Map();

const say = (message) => process.stdout.write(JSON.stringify(message) + "\n");

function watch(client, pusher) {
  pushers.set(client, pusher);
  pusher.connection.bind("state_change", ({ current }) => say({ client, state: current }));
  pusher.connection.bind("error", (error) => {
    const { code, message } = error?.data ?? error?.error?.data ?? { code: null, message: String(error) };
    say({ client, error_code: code, error: message });
  });
}

function pick(map, name) {
  if (!map.has(name)) throw new Error(`nothing is called ${name}`);
  return map.get(name);
}

// Echo's channel objects by client and name, so that `whisper` and `listen` reach the one that was joined.
const echoChannel = (client, name) => pick(echoChannels, `${client} ${name}`);

const commands = {
  // pusher-js
  connect: ({ client, key, options }) => watch(client, new Pusher(key, options)),
  reconnect: ({ client }) => pick(pushers, client).connect(),
  disconnect: ({ client }) => pick(pushers, client).disconnect(),
  state: ({ client }) => pick(pushers, client).connection.state,
  socket_id: ({ client }) => pick(pushers, client).connection.socket_id,
  subscribe: ({ client, channel, events = [] }) => {
    const subscribed = pick(pushers, client).subscribe(channel);
    // A bound event carries its metadata (user_id); all others are seen by the global binding, without.
    for (const event of events) {
      subscribed.bind(event, (data, metadata) => say({ client, channel, event, data, user_id: metadata?.user_id }));
    }
    subscribed.bind_global((event, data) => {
      if (!events.includes(event)) say({ client, channel, event, data });
    });
  },
  unsubscribe: ({ client, channel }) => pick(pushers, client).unsubscribe(channel),
  trigger: ({ client, channel, event, data }) => pick(pushers, client).channel(channel).trigger(event, data),
  members: ({ client, channel }) => {
    const { members } = pick(pushers, client).channel(channel);
    return { count: members.count, me: members.me, all: members.members };
  },

  // laravel-echo
  echo: ({ client, options }) => {
    const echo = new Echo({ Pusher, ...options });
    echoes.set(client, echo);
    watch(client, echo.connector.pusher);
  },
  echo_socket_id: ({ client }) => pick(echoes, client).socketId(),
  echo_listen: ({ client, channel, kind, events = [], whispers = [] }) => {
    const echo = pick(echoes, client);
    const joined = { public: () => echo.channel(channel), private: () => echo.private(channel), presence: () => echo.join(channel) }[kind]();
    echoChannels.set(`${client} ${channel}`, joined);
    const tell = (event) => (data) => say({ client, channel, event, data });
    joined.subscribed(tell("subscribed")).error(tell("error"));
    for (const event of events) joined.listen(event, tell(event));
    for (const event of whispers) joined.listenForWhisper(event, tell(`whisper ${event}`));
    if (kind === "presence") joined.here(tell("here")).joining(tell("joining")).leaving(tell("leaving"));
  },
  echo_whisper: ({ client, channel, event, data }) => { echoChannel(client, channel).whisper(event, data); },
  echo_leave: ({ client, channel }) => pick(echoes, client).leave(channel),
  echo_disconnect: ({ client }) => pick(echoes, client).disconnect(),

  // pusher (npm), the server library
  server: ({ client, options }) => { servers.set(client, new PusherServer(options)); },
  server_call: async ({ client, method, args }) => {
    const answer = await pick(servers, client)[method](...args);
    const text = await answer.text();
    return { status: answer.status, body: JSON.parse(text), trace_id: answer.headers.get("x-service-trace-id") };
  },
  server_authorize: ({ client, args }) => pick(servers, client).authorizeChannel(...args),
};

for await (const line of createInterface({ input: process.stdin })) {
  const { id, do: name, ...parameters } = JSON.parse(line);
  // A slow command (an HTTP call) does not hold up the next one: tests publish from several at once.
  Promise.resolve()
    .then(() => commands[name](parameters))
    .then((ok) => say({ id, ok: ok === undefined || ok instanceof Object && !isPlain(ok) ? null : ok }))
    .catch((error) => say({ id, error: error?.body ? `${error.message} ${error.status} ${error.body}` : String(error) }));
}
process.exit(0);

function isPlain(value) {
  return Array.isArray(value) || Object.getPrototypeOf(value) === Object.prototype;
}
