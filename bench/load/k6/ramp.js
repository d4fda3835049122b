// A ramp: connections come evenly until there are CONNECTIONS (200) after SECONDS (30); each stays to the end. RATE (20)
// events a second are published meanwhile.
//
//     PUSHER_URL=http://KEY:SECRET@HOST:PORT/apps/ID k6 run bench/load/k6/ramp.js

import exec from "k6/execution";
import { channelOf, publish, publishing as publishAt, subscribe, thresholds } from "./pusher.js";

const CONNECTIONS = Number(__ENV.CONNECTIONS || 200);
const SECONDS = Number(__ENV.SECONDS || 30);
const RATE = Number(__ENV.RATE || 20);

export const options = {
  scenarios: {
    connections: {
      executor: "ramping-vus",
      exec: "connections",
      startVUs: 0,
      stages: [{ duration: `${SECONDS}s`, target: CONNECTIONS }],
      gracefulStop: "10s",
      gracefulRampDown: "10s",
    },
    publishing: publishAt(RATE, `${SECONDS}s`),
  },
  thresholds,
};

export function connections() {
  subscribe(channelOf(__VU), exec.scenario.startTime + SECONDS * 1000 + 1000 - Date.now());
}

export function publishing() {
  publish(channelOf(Math.floor(Math.random() * 10)));
}
