// A spike: CONNECTIONS (50) subscribers all the time, ten times as many at once after a third of SECONDS (30), for a
// third. RATE (20) events a second are published all the time; those who were there before must not notice.
//
//     PUSHER_URL=http://KEY:SECRET@HOST:PORT/apps/ID k6 run bench/load/k6/spike.js

import { channelOf, publish, publishing as publishAt, subscribe, thresholds } from "./pusher.js";

const CONNECTIONS = Number(__ENV.CONNECTIONS || 50);
const SECONDS = Number(__ENV.SECONDS || 30);
const RATE = Number(__ENV.RATE || 20);
const THIRD = Math.ceil(SECONDS / 3);

const crowd = (vus, stays, startTime) => ({
  executor: "per-vu-iterations",
  exec: "connections",
  vus,
  iterations: 1,
  startTime: `${startTime}s`,
  maxDuration: `${stays + 10}s`,
  env: { STAYS: String(stays) },
});

export const options = {
  scenarios: {
    always: crowd(CONNECTIONS, SECONDS, 0),
    spike: crowd(CONNECTIONS * 9, THIRD, THIRD),
    publishing: publishAt(RATE, `${SECONDS - 2}s`, "1s"),
  },
  thresholds,
};

export function connections() {
  subscribe(channelOf(__VU), Number(__ENV.STAYS) * 1000);
}

export function publishing() {
  publish(channelOf(Math.floor(Math.random() * 10)));
}
