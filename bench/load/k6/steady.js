// A steady load: CONNECTIONS (100) subscribers stay for SECONDS (30), RATE (20) events a second are published.
//
//     PUSHER_URL=http://KEY:SECRET@HOST:PORT/apps/ID k6 run bench/load/k6/steady.js

import { channelOf, publish, publishing as publishAt, subscribe, thresholds } from "./pusher.js";

const CONNECTIONS = Number(__ENV.CONNECTIONS || 100);
const SECONDS = Number(__ENV.SECONDS || 30);
const RATE = Number(__ENV.RATE || 20);

export const options = {
  scenarios: {
    connections: {
      executor: "per-vu-iterations",
      exec: "connections",
      vus: CONNECTIONS,
      iterations: 1,
      maxDuration: `${SECONDS + 10}s`,
    },
    publishing: publishAt(RATE, `${Math.max(1, SECONDS - 4)}s`, "2s"),
  },
  thresholds,
};

export function connections() {
  subscribe(channelOf(__VU), SECONDS * 1000);
}

export function publishing() {
  publish(channelOf(Math.floor(Math.random() * 10)));
}
