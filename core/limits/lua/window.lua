-- window: the counters of one scope, in front of every verb. What has left the window is taken off as it is read, a bin
-- at a time, so a call costs the bins that have passed since the last one, not all that there are.
-- A counter HASH: running, held_in, held_out: open requests and what they hold; requests, input, output: the sums over
-- the window; first, last: its oldest bin and its newest; <bin>: 'requests input output' of that half second; ahead: how
-- much of what is held will have come after each step from now, packed doubles.
local BIN_MS, WINDOW_MS, LOOK = 500, 60000, 24
-- What is held beyond its next FIRM_MS needs no room now, but when it comes, while what is in the window leaves it. That
-- is looked at after each of STEPS steps, as if it came SLACK_MS sooner: so much longer it counts, by its bin, by the
-- second between two reports, and for what is firm of the next.
local STEPS, STEP_MS, FIRM_MS, SLACK_MS = 12, 5000, 1250, 2250
local PACKED = '<' .. string.rep('d', STEPS)
local call, now = redis.call, now_ms()
local newest = math.floor(now / BIN_MS)
local oldest = math.floor((now - WINDOW_MS) / BIN_MS) -- no bin before it has a part in the window
local newest_name = string.format('%.0f', newest)

local function numbers(bin)
  if not bin then return 0, 0, 0 end
  local requests, input, output = string.match(bin, '^(%d+) (%d+) (%d+)$')
  return tonumber(requests), tonumber(input), tonumber(output)
end

local function written(requests, input, output)
  return string.format('%.0f %.0f %.0f', requests, input, output)
end

local function bins_of(first, last)
  local names = {}
  for bin = first, last do names[#names + 1] = string.format('%.0f', bin) end
  return names
end

-- The bins of a counter from `first` to `last`, summed up and struck off.
local function taken(c, first, last)
  local names, requests, input, output = bins_of(first, last), 0, 0, 0
  for i, bin in ipairs(call('HMGET', c.key, unpack(names))) do
    local r, t_in, t_out = numbers(bin)
    requests, input, output = requests + r, input + t_in, output + t_out
    c.gone[#c.gone + 1] = names[i]
  end
  return requests, input, output
end

-- Of output that comes at a pace (thousandths of a token a second; 0: at once) what is firm,
local function firm_of(pace, output)
  return pace == 0 and output or math.min(output, math.ceil(pace * FIRM_MS / 1000000))
end

-- and how much will have come after each step.
local function coming(pace, output)
  local ahead = {}
  for k = 1, STEPS do
    ahead[k] = pace == 0 and output or math.min(output, math.ceil(pace * (k * STEP_MS + SLACK_MS) / 1000000))
  end
  return ahead
end

local NOTHING = coming(0, 0)

local function expect(c, before, after)
  for k = 1, STEPS do c.ahead[k] = math.max(0, c.ahead[k] - before[k] + after[k]) end
end

-- Counters that this call has read.
local counters = {}

-- A counter as it is now. Nothing is written until `save`.
local function load(key)
  if counters[key] then return counters[key] end
  local raw = call('HMGET', key, 'running', 'held_in', 'held_out', 'requests', 'input', 'output', 'first', 'last',
    newest_name, 'ahead')
  local c = { key = key, gone = {}, running = tonumber(raw[1] or 0), held_in = tonumber(raw[2] or 0),
    held_out = tonumber(raw[3] or 0), requests = tonumber(raw[4] or 0), input = tonumber(raw[5] or 0),
    output = tonumber(raw[6] or 0), first = tonumber(raw[7] or newest), last = tonumber(raw[8] or newest),
    ahead = raw[10] and { struct.unpack(PACKED, raw[10]) } or coming(0, 0) }
  c.idle = c.running == 0
  c.bin_requests, c.bin_input, c.bin_output = numbers(raw[9])
  if c.last > newest then -- the clock went back: what came later than now counts as come now, so for longer, not less
    local requests, input, output = taken(c, math.max(c.first, newest + 1), c.last)
    c.bin_requests, c.bin_input, c.bin_output = c.bin_requests + requests, c.bin_input + input, c.bin_output + output
    c.first, c.last, c.moved = math.min(c.first, newest), newest, true
  elseif raw[7] and c.first < oldest then
    local requests, input, output = taken(c, c.first, math.min(oldest - 1, c.last))
    c.requests, c.input, c.output = c.requests - requests, c.input - input, c.output - output
    c.first = oldest
  end
  counters[key] = c
  return c
end

local function add(c, requests, input, output)
  if requests + input + output == 0 then return end
  c.requests, c.input, c.output = c.requests + requests, c.input + input, c.output + output
  c.bin_requests, c.bin_input, c.bin_output = c.bin_requests + requests, c.bin_input + input, c.bin_output + output
  c.last = newest
end

local function save(c)
  if #c.gone > 0 then call('HDEL', c.key, unpack(c.gone)) end
  local first, bin, counted = math.min(c.first, c.last), 'last', c.last -- a bin is written once something is in it
  if c.last == newest then bin, counted = newest_name, written(c.bin_requests, c.bin_input, c.bin_output) end
  call('HSET', c.key, 'running', c.running, 'held_in', c.held_in, 'held_out', c.held_out, 'requests', c.requests,
    'input', c.input, 'output', c.output, 'first', first, 'last', c.last, bin, counted,
    'ahead', struct.pack(PACKED, unpack(c.ahead, 1, STEPS)))
  if c.running == 0 then call('PEXPIRE', c.key, 2 * WINDOW_MS) -- nothing of it is in the window then
  elseif c.idle then call('PERSIST', c.key) end
end

-- Output that a scope can still bear, and what it can bear of anything, which is less than 0 where it bears too much;
-- huge where nothing limits it.
local function room_of(c, limit)
  local room = limit.tokens < 0 and 2 ^ 53 or limit.tokens - c.input - c.output - c.held_in - c.held_out
  if limit.output >= 0 then room = math.min(room, limit.output - c.output - c.held_out) end
  if limit.input < 0 then return room, room end
  return room, math.min(room, limit.input - c.input - c.held_in)
end

-- How long until a bin has left the window.
local function leaves_ms(bin) return (bin + 1) * BIN_MS + WINDOW_MS - now end

-- How long until so much has left the window that `fits` says yes, if nothing else comes; -1: not by leaving alone.
-- Most often that is soon, so it looks at a few bins at a time.
local function frees_ms(c, fits)
  if not fits(0, 0, 0) then return -1 end
  local requests, input, output = c.requests, c.input, c.output
  for from = c.first, c.last, LOOK do
    local names = bins_of(from, math.min(from + LOOK - 1, c.last))
    for i, one in ipairs(call('HMGET', c.key, unpack(names))) do
      local r, t_in, t_out
      if names[i] == newest_name then r, t_in, t_out = c.bin_requests, c.bin_input, c.bin_output
      else r, t_in, t_out = numbers(one) end
      requests, input, output = requests - r, input - t_in, output - t_out
      if fits(requests, input, output) then return leaves_ms(from + i - 1) end
    end
  end
  return -1
end

-- What may be in the window, now and after each step, of what is in it now: what remains of `room` when all that is held
-- has come, and this request's.
local function rooms_of(c, room, firm, ahead)
  local rooms = { [0] = room - c.held_out - firm }
  for k = 1, STEPS do rooms[k] = math.min(rooms[k - 1], room - c.ahead[k] - ahead[k]) end
  return rooms
end

-- How long until output of a kind fits, now and ever after: of what is in the window now, no more than `rooms` may be
-- left at any time, on a straight line between two steps. Each bin must have left before that many are too many.
-- 0: it fits; -1: not by leaving alone.
local function fits_ms(c, used, of, rooms)
  if used <= rooms[STEPS] then return 0 end
  if rooms[STEPS] < 0 then return -1 end
  local left, k, wait_ms = used, 0, 0
  local function may_stay_ms()
    while left <= rooms[k + 1] do k = k + 1 end
    return k * STEP_MS + math.max(0, math.floor((rooms[k] - left) * STEP_MS / (rooms[k] - rooms[k + 1])))
  end
  for from = c.first, c.last, LOOK do
    local names = bins_of(from, math.min(from + LOOK - 1, c.last))
    for i, one in ipairs(call('HMGET', c.key, unpack(names))) do
      local _, t_in, t_out = numbers(one)
      if names[i] == newest_name then t_in, t_out = c.bin_input, c.bin_output end
      local tokens = of(t_in, t_out)
      if tokens > 0 then wait_ms = math.max(wait_ms, leaves_ms(from + i - 1) - may_stay_ms()) end
      left = left - tokens
      if left <= rooms[STEPS] then return wait_ms end
    end
  end
  return -1
end

-- What a counter has left of each limit (-1: no limit), and how long until all of it is free again, if what runs ended
-- now.
local function tell(reply, c, limit)
  local function left(most, used) return most < 0 and -1 or math.max(0, most - used) end
  local held, at = c.held_in + c.held_out, #reply
  local all, output = c.input + c.output + held, c.output + c.held_out
  reply[at + 1] = left(limit.requests, c.requests)
  reply[at + 2] = left(limit.tokens, math.max(all, c.held_in + c.ahead[STEPS]))
  reply[at + 3] = left(limit.input, c.input + c.held_in)
  reply[at + 4] = left(limit.output, math.max(output, c.ahead[STEPS]))
  reply[at + 5] = c.requests + all == 0 and 0 or math.max(0, leaves_ms(held > 0 and newest or c.last))
end
