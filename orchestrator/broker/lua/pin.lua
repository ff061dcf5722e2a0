-- KEYS pins; ARGV ttl_s, then name/line pairs.
-- Returns for each name the line that was pinned under it first, by whichever gateway.
local names = {}
for i = 2, #ARGV, 2 do
  redis.call('HSETNX', KEYS[1], ARGV[i], ARGV[i + 1])
  names[#names + 1] = ARGV[i]
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return redis.call('HMGET', KEYS[1], unpack(names))
