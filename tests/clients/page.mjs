// What a page does with pusher-js and laravel-echo, as commands that take and give JSON. Runs in Node (driver.mjs) and in
// a browser (tests/matrix/page.html) alike. It decides nothing and asserts nothing: everything that a client reports goes to `say`.

// `more` is added to the options of every pusher-js client: what cannot come as JSON. `redpoll` is our own module.
export function pageCommands({ Pusher, Echo, redpoll, say, more = {} }) {
  const pushers = new Map();
  const echoes = new Map();
  const echoChannels = new Map();
  let kept = null;

  function watch(client, pusher) {
    pushers.set(client, pusher);
    pusher.connection.bind("state_change", ({ current }) => say({ client, state: current }));
    pusher.connection.bind("error", (error) => {
      const { code, message } = error?.data ?? error?.error?.data ?? { code: null, message: String(error) };
      say({ client, error_code: code, error: message });
    });
    // What is sent to the user and about friends, as if it came on channels of these names.
    pusher.user.bind_global((event, data) => say({ client, channel: "(user)", event, data }));
    pusher.user.watchlist.bind_global((event, data) => say({ client, channel: "(watchlist)", event, data }));
  }

  function pick(map, name) {
    if (!map.has(name)) throw new Error(`nothing is called ${name}`);
    return map.get(name);
  }

  // Echo's channel objects by client and name, so that `whisper` and `listen` reach the one that was joined.
  const echoChannel = (client, name) => pick(echoChannels, `${client} ${name}`);

  function tellSignin(client, { user }) {
    user.signinDonePromise.then(() => say({ client, channel: "(user)", event: "signed in", data: user.user_data }));
  }

  // What a page with a signed channel grant returns for each channel, without a request.
  const granted = ({ auth, user_id }, name) =>
    name.startsWith("presence-") ? { auth, channel_data: JSON.stringify({ user_id }) } : { auth };

  // `grant`: as above. `authorizer`: the options of redpoll.js' own one.
  function withHandler({ grant, authorizer, ...options }) {
    let customHandler = ({ channelName }, callback) => callback(null, granted(grant, channelName));
    if (authorizer) customHandler = redpoll.authorizer(authorizer);
    return grant || authorizer ? { ...options, channelAuthorization: { customHandler } } : options;
  }

  function withAuthorizer({ grant, ...options }) {
    const authorizer = ({ name }) => ({ authorize: (socketId, callback) => callback(null, granted(grant, name)) });
    return grant ? { ...options, authorizer } : options;
  }

  return {
    // pusher-js
    connect: ({ client, key, options }) => watch(client, new Pusher(key, { ...more, ...withHandler(options) })),
    connect_redpoll: ({ client, key, options }) => watch(client, redpoll(new Pusher(key, { ...more, ...options }))),
    // The page can't open WebSockets, as behind some proxies; or it can again.
    forbid_websockets: () => { kept = globalThis.WebSocket; delete globalThis.WebSocket; },
    allow_websockets: () => { globalThis.WebSocket = kept; },
    // The browser's own reader of streams.
    read_events: ({ client, url, events }) => {
      const source = new EventSource(url);
      for (const event of events) source.addEventListener(event, ({ data }) => say({ client, event, data }));
      source.addEventListener("pusher:end", () => source.close());
    },
    reconnect: ({ client }) => pick(pushers, client).connect(),
    disconnect: ({ client }) => pick(pushers, client).disconnect(),
    state: ({ client }) => pick(pushers, client).connection.state,
    socket_id: ({ client }) => pick(pushers, client).connection.socket_id,
    transport: ({ client }) => pick(pushers, client).connection.connection?.transport.name,
    subscribe: ({ client, channel, events = [], wanted }) => {
      const subscribed = pick(pushers, client).subscribe(channel, wanted);
      // A bound event carries its metadata (user_id); all others are seen by the global binding, without.
      for (const event of events) {
        subscribed.bind(event, (data, metadata) => say({ client, channel, event, data, user_id: metadata?.user_id }));
      }
      subscribed.bind_global((event, data) => {
        if (!events.includes(event)) say({ client, channel, event, data });
      });
    },
    // The library goes on with the options that it has, so the new server's address is written into them.
    switch_cluster: ({ client, key, options }) => {
      const pusher = pick(pushers, client);
      Object.assign(pusher.options, options);
      pusher.switchCluster({ appKey: key, cluster: "any" });
    },
    unsubscribe: ({ client, channel }) => pick(pushers, client).unsubscribe(channel),
    // Any event, in this library's public words; Echo's clients have it by way of their connector.
    send_event: ({ client, event, data, channel }) => pick(pushers, client).send_event(event, data, channel),
    trigger: ({ client, channel, event, data }) => pick(pushers, client).channel(channel).trigger(event, data),
    history: ({ client, channel, asked }) => pick(pushers, client).history(channel, asked),
    follow_texts: ({ client, name, channel, options }) => {
      redpoll.followTexts(pick(pushers, client), channel, options, (view) => say({ client, name, channel, view }));
    },
    position: ({ client, channel }) => pick(pushers, client).position(channel),
    members: ({ client, channel }) => {
      const { members } = pick(pushers, client).channel(channel);
      return { count: members.count, me: members.me, all: members.members };
    },
    subscription_count: ({ client, channel }) => pick(pushers, client).channel(channel).subscriptionCount,
    signin: ({ client }) => {
      const pusher = pick(pushers, client);
      pusher.signin();
      tellSignin(client, pusher);
    },
    // Whether events for the user come through by now: the library subscribes to them after the signin.
    hears_user_events: ({ client }) => pick(pushers, client).user.serverToUserChannel?.subscribed ?? false,
    uses_tls: ({ client }) => pick(pushers, client).connection.usingTLS,

    // laravel-echo
    echo: ({ client, options }) => {
      const echo = new Echo({ Pusher, ...more, ...withAuthorizer(options) });
      echoes.set(client, echo);
      watch(client, echo.connector.pusher);
    },
    echo_socket_id: ({ client }) => pick(echoes, client).socketId(),
    echo_listen: ({ client, channel, kind, events = [], whispers = [] }) => {
      const echo = pick(echoes, client);
      const joined = {
        public: () => echo.channel(channel),
        private: () => echo.private(channel),
        presence: () => echo.join(channel),
        encrypted: () => echo.encryptedPrivate(channel),
      }[kind]();
      echoChannels.set(`${client} ${channel}`, joined);
      const tell = (event) => (data) => say({ client, channel, event, data });
      joined.subscribed(tell("subscribed")).error(tell("error"));
      for (const event of events) joined.listen(event, tell(event));
      for (const event of whispers) joined.listenForWhisper(event, tell(`whisper ${event}`));
      if (kind === "presence") joined.here(tell("here")).joining(tell("joining")).leaving(tell("leaving"));
    },
    echo_whisper: ({ client, channel, event, data }) => { echoChannel(client, channel).whisper(event, data); },
    echo_leave: ({ client, channel }) => pick(echoes, client).leave(channel),
    echo_signin: ({ client }) => {
      const { connector } = pick(echoes, client);
      connector.signin();
      tellSignin(client, connector.pusher);
    },
    echo_disconnect: ({ client }) => pick(echoes, client).disconnect(),
  };
}

// A command's answer as JSON can say it: the libraries' own objects become null.
export function plain(value) {
  if (value === undefined) return null;
  if (!(value instanceof Object) || Array.isArray(value)) return value;
  return Object.getPrototypeOf(value) === Object.prototype ? value : null;
}
