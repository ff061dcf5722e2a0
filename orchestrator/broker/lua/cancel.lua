-- KEYS turn, timeline, log, queue, events, recent, counters; ARGV id, final_ttl_s, now, recent_length,
-- events_length, timeline_entry, withdrawn_event, cancel_event, end_entry,
-- channel_prefix.
-- A queued turn is cancelled here and now; of any other that has not ended its owner is told, and the
-- record keeps the wish for an owner who comes later.
-- Returns the state that the turn was in, or an empty string when there is no such turn.
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return '' end
if state == 'queued' then
  redis.call('ZREM', KEYS[4], ARGV[1])
  redis.call('HSET', KEYS[1], 'state', 'cancelled')
  redis.call('RPUSH', KEYS[2], ARGV[6])
  redis.call('RPUSH', KEYS[3], ARGV[9])
  redis.call('ZADD', KEYS[6], ARGV[3], ARGV[1])
  redis.call('ZREMRANGEBYRANK', KEYS[6], 0, -tonumber(ARGV[4]) - 1)
  redis.call('HINCRBY', KEYS[7], 'turns_cancelled', 1)
  for i = 1, 3 do redis.call('EXPIRE', KEYS[i], ARGV[2]) end
  redis.call('XADD', KEYS[5], 'MAXLEN', '~', ARGV[5], '*', 'e', ARGV[7])
  local channel = ARGV[10] .. (redis.call('HGET', KEYS[1], 'gateway') or '')
  redis.call('PUBLISH', channel, '[["' .. ARGV[1] .. '",0,[' .. ARGV[9] .. ']]]')
elseif state == 'claimed' or state == 'running' or state == 'paused' then
  redis.call('HSET', KEYS[1], 'cancelling', 1)
  redis.call('XADD', KEYS[5], 'MAXLEN', '~', ARGV[5], '*', 'e', ARGV[8])
end
return state
