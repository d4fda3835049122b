import type { RedpollFunction } from "./types.mjs" with { "resolution-mode": "import" };

declare const redpoll: RedpollFunction;
export = redpoll;
export as namespace redpoll;
