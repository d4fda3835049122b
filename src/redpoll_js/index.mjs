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
import { authorizer } from "./authorizer.mjs";
import { followTexts } from "./follow.mjs";
import { redpoll } from "./recovery.mjs";
import { streamSource } from "./sources.mjs";

Object.assign(redpoll, { authorizer, followTexts, streamSource });

export { authorizer, followTexts, redpoll, streamSource };
export default redpoll;
