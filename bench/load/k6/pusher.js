// What the k6 scripts share: a Pusher client that subscribes and measures, and a signed publish.
//
// PUSHER_URL=http://KEY:SECRET@HOST:PORT/apps/ID names the server. Every event carries the time at which it was sent;
// k6 runs all virtual users in one process, so both ends read one clock.

import crypto from "k6/crypto";
import http from "k6/http";
import { check } from "k6";
import { Counter, Rate, Trend } from "k6/metrics";
import { WebSocket } from "k6/experimental/websockets";

const match = /^http:\/\/([^:]+):([^@]+)@([^/]+)\/apps\/([^/]+)$/.exec(__ENV.PUSHER_URL || "");
if (!match) {
  throw new Error("PUSHER_URL must be http://KEY:SECRET@HOST:PORT/apps/ID");
}
const [, KEY, SECRET, HOST, APP_ID] = match;
const EVENT = "k6-event";

export const subscribeTime = new Trend("subscribe_time", true);
export const eventLatency = new Trend("event_latency", true);
export const subscribed = new Rate("subscribed");
export const events = new Counter("events");
export const reconnected = new Trend("reconnect_time", true);

// Connects, subscribes to a private channel and stays for `stayMs`. `onReady(socket)` when it is subscribed,
// `onLost()` when the connection ends before.
export function subscribe(channel, stayMs, onReady = () => {}, onLost = () => {}) {
  const began = Date.now();
  const socket = new WebSocket(`ws://${HOST}/app/${KEY}?protocol=7&client=k6`);
  let ready = false;
  let leaving = false;
  socket.addEventListener("message", ({ data: text }) => {
    const message = JSON.parse(text);
    if (message.event === EVENT) {
      events.add(1);
      eventLatency.add(Date.now() - JSON.parse(message.data).sent);
    } else if (message.event === "pusher:connection_established") {
      const socketId = JSON.parse(message.data).socket_id;
      const signature = crypto.hmac("sha256", SECRET, `${socketId}:${channel}`, "hex");
      socket.send(JSON.stringify({ event: "pusher:subscribe", data: { channel, auth: `${KEY}:${signature}` } }));
    } else if (message.event === "pusher_internal:subscription_succeeded") {
      ready = true;
      subscribed.add(true);
      subscribeTime.add(Date.now() - began);
      onReady(socket);
    } else if (message.event === "pusher:ping") {
      socket.send('{"event":"pusher:pong","data":{}}');
    }
  });
  socket.addEventListener("close", () => {
    if (!ready) {
      subscribed.add(false);
    }
    if (!leaving) {
      onLost();
    }
  });
  setTimeout(() => {
    leaving = true;
    socket.close();
  }, stayMs);
}

export function publish(channel) {
  const data = JSON.stringify({ sent: Date.now(), text: "x".repeat(80) });
  const body = JSON.stringify({ name: EVENT, channels: [channel], data });
  const path = `/apps/${APP_ID}/events`;
  const query =
    `auth_key=${KEY}&auth_timestamp=${Math.floor(Date.now() / 1000)}&auth_version=1.0` +
    `&body_md5=${crypto.md5(body, "hex")}`;
  const signature = crypto.hmac("sha256", SECRET, `POST\n${path}\n${query}`, "hex");
  const answer = http.post(`http://${HOST}${path}?${query}&auth_signature=${signature}`, body, {
    headers: { "Content-Type": "application/json" },
    tags: { name: "publish" },
  });
  check(answer, { "published with 200": ({ status }) => status === 200 });
}

export const channelOf = (number) => `private-k6-${number % 10}`;

// The scenario that publishes `rate` events a second for `duration`, beside the connections of a script.
export const publishing = (rate, duration, startTime = "0s") => ({
  executor: "constant-arrival-rate",
  exec: "publishing",
  rate,
  timeUnit: "1s",
  duration,
  startTime,
  preAllocatedVUs: 10,
});

export const thresholds = {
  subscribed: ["rate>0.999"],
  subscribe_time: ["p(95)<1000"],
  event_latency: ["p(99)<500"],
  "http_req_duration{name:publish}": ["p(99)<500"],
  checks: ["rate>0.999"],
};
