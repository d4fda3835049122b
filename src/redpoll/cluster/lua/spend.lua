#!lua
-- Counts an app's messages of one day, unless they would exceed its daily limit.
--
-- KEYS  1 d  messages of that day  2 i  marker: these messages were counted. Only if they can be asked for again
-- ARGV  1 messages to add  2 limit  3 the count is raised to at least this first (after Redis lost its data)
--       4 seconds that the count is kept  5 seconds that the marker is kept
-- Returns {1, the new count}, or {0, the present count}: refused, nothing was added.

local stored = tonumber(redis.call('GET', KEYS[1]) or '0')
local used = math.max(stored, tonumber(ARGV[3]))
if KEYS[2] and redis.call('EXISTS', KEYS[2]) == 1 then return {1, used} end
local fits = used + tonumber(ARGV[1]) <= tonumber(ARGV[2])
if fits then used = used + tonumber(ARGV[1]) end
if used > stored then redis.call('SET', KEYS[1], string.format('%.0f', used), 'EX', ARGV[4]) end
if fits and KEYS[2] then redis.call('SET', KEYS[2], '', 'EX', ARGV[5]) end
return {fits and 1 or 0, used}
