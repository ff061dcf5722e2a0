-- KEYS turn, timeline, queue, events, lease, owned; ARGV id, lease_value, backend, events_length,
-- withdrawn_event, timeline_entry.
-- Safe to repeat. Returns the record, an empty list when the turn is not there to be taken, or 'deposed'.
if redis.call('GET', KEYS[5]) ~= ARGV[2] then return 'deposed' end
if redis.call('ZREM', KEYS[3], ARGV[1]) == 0 then
  local held = redis.call('HMGET', KEYS[1], 'state', 'backend')
  if held[1] == 'claimed' and held[2] == ARGV[3] then return redis.call('HGETALL', KEYS[1]) end
  return {}
end
if redis.call('HGET', KEYS[1], 'state') ~= 'queued' then return {} end
redis.call('HSET', KEYS[1], 'state', 'claimed', 'backend', ARGV[3])
redis.call('SADD', KEYS[6], ARGV[1])
redis.call('RPUSH', KEYS[2], ARGV[6])
redis.call('XADD', KEYS[4], 'MAXLEN', '~', ARGV[4], '*', 'e', ARGV[5])
return redis.call('HGETALL', KEYS[1])
