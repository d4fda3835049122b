import Pusher from "pusher-js";
import redpoll from "redpoll-js";

// A client of the server that the back end publishes to. Each page is a user of its own here.
export async function connect() {
  const { key, host, port, ssl } = await (await fetch("/api/settings")).json();
  const headers = { "X-Page": crypto.randomUUID() };
  const customHandler = redpoll.authorizer({ endpoint: "/api/realtime/auth", headers });
  return redpoll(new Pusher(key, {
    cluster: "any", wsHost: host, wsPort: port, wssPort: port, forceTLS: ssl, enabledTransports: [ssl ? "wss" : "ws"],
    channelAuthorization: { customHandler },
  }));
}
