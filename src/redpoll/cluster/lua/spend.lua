#!lua
-- Counts an app's messages of a day, and refuses those beyond its limit.
--
-- KEYS  1 d  messages of that day
-- ARGV  1 n  messages to come  2 limit  3 least: the day's count is at least this (after Redis lost its data)
--       4 s that the count is kept
-- Returns {1, messages with these}, or {0, messages without these}: refused, nothing was added.

local stored = tonumber(redis.call('GET', KEYS[1]) or '0')
local used = math.max(stored, tonumber(ARGV[3]))
local fits = used + tonumber(ARGV[1]) <= tonumber(ARGV[2])
if fits then used = used + tonumber(ARGV[1]) end
if used > stored then redis.call('SET', KEYS[1], string.format('%.0f', used), 'EX', ARGV[4]) end
return {fits and 1 or 0, used}
