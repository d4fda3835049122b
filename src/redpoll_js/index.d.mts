import type { RedpollFunction } from "./types.mjs";

export type * from "./types.mjs";
export declare const redpoll: RedpollFunction;
export declare const authorizer: RedpollFunction["authorizer"];
export declare const followTexts: RedpollFunction["followTexts"];
export declare const streamSource: RedpollFunction["streamSource"];
export default redpoll;
