#!lua
-- Writes one app's record into the directory, or removes it, and informs every worker in the same step. Does nothing
-- unless the directory has the version before this change and all its records: else another change is missing in it, it
-- has this one, or records were lost.
--
-- KEYS  1 dir      records by app id
--       2 dirver   '<version> <number of records> <id of the version>'
-- ARGV  1 app id   2 record as JSON, or empty: the app was deleted   3 the new version
--       4 PUBLISH or SPUBLISH   5 the topic sys   6 the message
--       7 the version before   8 the id of the new version   9 the id of the version before
-- Returns 1, or 0 if it did nothing.

local stored = redis.call('GET', KEYS[2]) or ''
if stored ~= string.format('%s %d %s', ARGV[7], redis.call('HLEN', KEYS[1]), ARGV[9]) then return 0 end
if ARGV[2] == '' then redis.call('HDEL', KEYS[1], ARGV[1]) else redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) end
redis.call('SET', KEYS[2], string.format('%s %d %s', ARGV[3], redis.call('HLEN', KEYS[1]), ARGV[8]))
redis.call(ARGV[4], ARGV[5], ARGV[6])
return 1
