-- KEYS lease, then one log a turn; ARGV lease_value, active_ttl_s, then for each turn: id, channel,
-- start, count, and that many entries (JSON).
-- Appends what is not there yet, so that a repeated call changes nothing, and publishes one message a
-- channel: a JSON list of [turn, number of the first entry, [entries]].
-- Returns each log's length, or 'deposed'. A length below `start` means that the log lost entries:
-- nothing was appended there.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 'deposed' end
local lengths, messages, channels = {}, {}, {}
local at = 3
for i = 2, #KEYS do
  local id, channel = ARGV[at], ARGV[at + 1]
  local start, count = tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  local first = at + 4
  local length = redis.call('LLEN', KEYS[i])
  local known = length - start
  if known >= 0 and known < count then
    length = redis.call('RPUSH', KEYS[i], unpack(ARGV, first + known, first + count - 1))
    if start + known == 0 then redis.call('EXPIRE', KEYS[i], ARGV[2]) end
    local pieces = messages[channel]
    if pieces then
      pieces[#pieces + 1] = ','
    else
      pieces = {}
      messages[channel] = pieces
      channels[#channels + 1] = channel
    end
    pieces[#pieces + 1] = '["' .. id .. '",' .. start .. ',['
    pieces[#pieces + 1] = table.concat(ARGV, ',', first, first + count - 1)
    pieces[#pieces + 1] = ']]'
  end
  lengths[#lengths + 1] = length
  at = first + count
end
for _, channel in ipairs(channels) do
  redis.call('PUBLISH', channel, '[' .. table.concat(messages[channel]) .. ']')
end
return lengths
