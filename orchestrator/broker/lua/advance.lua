-- KEYS turn, timeline, log, lease, owned, recent, counters; ARGV id, lease_value, target,
-- sources (comma-separated), final_ttl_s (0: not final), now, recent_length, timeline_entry,
-- counter_count, then counter/increment pairs, then field/value pairs.
-- Safe to repeat: in the target state already, nothing changes. Returns 'ok', 'deposed', or the present state when it does not lead to the target.
if redis.call('GET', KEYS[4]) ~= ARGV[2] then return 'deposed' end
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return 'missing' end
if state == ARGV[3] then return 'ok' end
if not string.find(',' .. ARGV[4] .. ',', ',' .. state .. ',', 1, true) then return state end
redis.call('HSET', KEYS[1], 'state', ARGV[3])
redis.call('RPUSH', KEYS[2], ARGV[8])
local first = 10
local count = tonumber(ARGV[9])
for i = 1, count do
  redis.call('HINCRBY', KEYS[7], ARGV[first], ARGV[first + 1])
  first = first + 2
end
if ARGV[first] then redis.call('HSET', KEYS[1], unpack(ARGV, first)) end
local ttl = tonumber(ARGV[5])
if ttl > 0 then
  redis.call('SREM', KEYS[5], ARGV[1])
  redis.call('ZADD', KEYS[6], ARGV[6], ARGV[1])
  redis.call('ZREMRANGEBYRANK', KEYS[6], 0, -tonumber(ARGV[7]) - 1)
  for i = 1, 3 do redis.call('EXPIRE', KEYS[i], ttl) end
end
return 'ok'
