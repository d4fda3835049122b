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
export function sourceOf(source) {
  return typeof source.follow === "function" ? source : pusherSource(source);
}

// Whether another subscriber sent this event, and not the back end: anybody who may read a channel may send such events.
export function isOfClient(event) {
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
export function hold(pusher, name, wanted) {
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
export function isRefused(pusher, channel) {
  return pusher.connection.state === "connected" && !channel.subscribed && !channel.subscriptionPending;
}

// Leaves the channel if nobody uses it. Later: React mounts twice in its strict mode, and pages change their parts.
export function release(pusher, name) {
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

export function pusherSource(pusher) {
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

export function refusal(data) {
  return new Error((data && (data.error || data.message)) || "the subscription was refused");
}

// -- HTTP

// Reads channels over HTTP. `server`: its URL; `app`: the app's id; `token`: a token of scope read, or a function of the
// channel that returns one, also as a promise.
export function streamSource(options) {
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
