#!lua flags=allow-oom
-- Takes a part of what an address may still publish in its window of the rate limit, for one node.
--
-- KEYS  1 rate  triggers that nodes have taken in the window
-- ARGV  1 triggers wanted  2 limit  3 ms of a window
-- Returns {triggers granted, triggers taken by all nodes, ms until the window ends}. The window begins with the first
--         call.

local taken = tonumber(redis.call('GET', KEYS[1]) or '0')
local left_ms, window_ms = redis.call('PTTL', KEYS[1]), tonumber(ARGV[3])
-- More is left than a window: the clock was set back.
if left_ms <= 0 or left_ms > window_ms then taken, left_ms = 0, window_ms end
local granted = math.max(0, math.min(tonumber(ARGV[1]), tonumber(ARGV[2]) - taken))
if granted > 0 then
  taken = taken + granted
  redis.call('SET', KEYS[1], string.format('%.0f', taken), 'PX', string.format('%.0f', left_ms))
end
return {granted, taken, left_ms}
