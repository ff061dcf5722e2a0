-- KEYS turn, prompts; ARGV observation (JSON), prompts_length, ttl_s.
-- Writes into a turn's record, if there still is one, what its prompt has in common with earlier ones, and
-- puts the same in front of its agent's list.
if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HSET', KEYS[1], 'prompt_like', ARGV[1]) end
redis.call('LPUSH', KEYS[2], ARGV[1])
redis.call('LTRIM', KEYS[2], 0, tonumber(ARGV[2]) - 1)
redis.call('EXPIRE', KEYS[2], ARGV[3])
return redis.status_reply('OK')
