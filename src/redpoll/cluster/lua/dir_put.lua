#!lua
-- Writes one app's record into the directory, or removes it, and informs every worker in the same step.
--
-- KEYS  1 dir      records by app id
--       2 dirver   version of the directory
-- ARGV  1 app id   2 record as JSON, or empty: the app was deleted   3 the new version
--       4 PUBLISH or SPUBLISH   5 the topic sys   6 the message
-- Returns the version.

if ARGV[2] == '' then redis.call('HDEL', KEYS[1], ARGV[1]) else redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) end
redis.call('SET', KEYS[2], ARGV[3])
redis.call(ARGV[4], ARGV[5], ARGV[6])
return ARGV[3]
