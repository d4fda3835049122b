#!lua
-- Publishes one event of a channel that caches, or one that is to be published once however often it is asked
-- for. Every other event is a plain PUBLISH.
--
-- KEYS  k       the channel's cached event (flag c)
--       then i  this event of that request is published (flag i)
-- ARGV  1 PUBLISH or SPUBLISH  2 topic
--       3 flags  c the event is cached
--                i it is published once
--       4 the envelope's tail  5 s that it is cached (flag c)  6 s that it counts as published (flag i)
-- Returns {'OK', workers that got it}: of an event that was published before, what was returned then.

local command, topic, flags, tail = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local caches = string.find(flags, 'c', 1, true)
local once = string.find(flags, 'i', 1, true) and KEYS[#KEYS]

local before = once and redis.call('GET', once)
if before then return {'OK', tonumber(before)} end

-- Cached first, in the same step: who joins hears of it exactly once, from the cache or live.
if caches then redis.call('SET', KEYS[1], tail, 'EX', ARGV[5]) end
local receivers = redis.call(command, topic, 'e 0 0 ' .. tail)
if once then redis.call('SET', once, receivers, 'EX', ARGV[6]) end
return {'OK', receivers}
