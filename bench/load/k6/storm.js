// A reconnect storm: CONNECTIONS (200) subscribers all close in the same moment, after a third of SECONDS (15), and come
// back one second later, as pusher-js does. `reconnect_time` is from the close to the new subscription, less that
// second.
//
//     PUSHER_URL=http://KEY:SECRET@HOST:PORT/apps/ID k6 run bench/load/k6/storm.js

import { channelOf, reconnected, subscribe, thresholds } from "./pusher.js";

const CONNECTIONS = Number(__ENV.CONNECTIONS || 200);
const SECONDS = Number(__ENV.SECONDS || 15);

export const options = {
  scenarios: {
    connections: {
      executor: "per-vu-iterations",
      exec: "connections",
      vus: CONNECTIONS,
      iterations: 1,
      maxDuration: `${SECONDS + 15}s`,
    },
  },
  thresholds: { subscribed: thresholds.subscribed, reconnect_time: ["p(99)<2000"] },
};

export function setup() {
  return { cutAt: Date.now() + (SECONDS / 3) * 1000 };
}

export function connections({ cutAt }) {
  const channel = channelOf(__VU);
  subscribe(channel, cutAt - Date.now());
  setTimeout(
    () => {
      const due = Date.now();
      subscribe(channel, (SECONDS * 1000) / 3, () => reconnected.add(Date.now() - due));
    },
    cutAt + 1000 - Date.now(),
  );
}
