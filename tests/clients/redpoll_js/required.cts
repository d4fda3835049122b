// The same with `require`.
import redpoll = require("redpoll-js");
import Pusher = require("pusher-js");

const pusher = redpoll(new Pusher.default("KEY", { cluster: "any" }));
export const position = pusher.position("news")?.offset;
export const source = redpoll.streamSource({ server: "https://a.example", app: "1" });
