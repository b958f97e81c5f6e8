-- prelude: the keys of one model's queue, in the order that every script gets them, and the rows.
-- The key table with types, writers and readers is in tasks/queue.py. ARGV[1] is the prefix of the model's channels.
local call = redis.call
local WAITING, TENANTS, ROWS, TASKS, CLAIMS = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local LEASES, SUMS, DEADLINES, DELAYS, FORGET = KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local COUNTERS, WAKE, USAGE, NONCES, GATEWAYS = KEYS[11], KEYS[12], KEYS[13], KEYS[14], KEYS[15]
local SERVICE, DUE, DEPTHS, ROOMS, SAVING = KEYS[16], KEYS[17], KEYS[18], KEYS[19], KEYS[20]
local HOMES, HELD, DEAD, LETTERS = KEYS[21], KEYS[22], KEYS[23], KEYS[24]
local EXTRA = 25 -- first key of a script's own, where it has one
local PREFIX = ARGV[1]

local FORGET_MS = 900000 -- an ended row is remembered this long: terminal record, duplicate check
local SILENCE_MS = 1500  -- nobody was heard for so long, and half a lease: the store was away, not its workers
local MERCY_MS = 3000    -- and at least this long after that nobody is reaped, also where no worker has said its lease
local LOSSES_MAX = 3     -- a request that took this many workers down with it is a dead letter
local ATTEMPTS_MAX = 10  -- from this attempt on it is under suspicion also when it had made tokens first
local OVERDUE_EVERY = 16 -- one claim in so many goes to whoever is overdue longest, of any class
local SAVE_MS = 2000     -- a request passed over for its size so long gets a worker that saves KV cache for it
local TOO_LARGE_MS = 60000 -- and if no worker there is could hold it even alone, for so long, it is ended
local HELD_MS = 900000   -- a request that no worker is alive for waits at most this long for one
local KEPT_MS = 86400000  -- background work, of which everybody was promised an end, as long as its body is kept
local DEAD_MS = 604800000 -- a dead letter is kept a week
local DEAD_MAX = 10000   -- and at most so many are
local CLASS_STRIDE = 70368744177664 -- 2^46: the class in a tenant's score
local SUM_MODULUS = 281474976710656 -- 2^48: sums stay exact in a double

local now = now_ms()

-- What a script reads or changes many times it has here, and it is written once: `settle` runs after every verb,
-- whichever way that returns (tasks/queue.py). A command from Lua costs more than what it does.
local rows, changed = {}, {}     -- id -> row; ids of those to be written
local counters, counts = {}, {}  -- name -> as it was; what was added to it
local sums = {}                  -- worker -> the sum of its claims, where it changed
local depths = {}                -- tenant -> {requests, tokens} added to what it has waiting
local ended = {}                 -- ids
local stops = nil                -- what operators have stopped: {mark, paused, shed}, once it was looked at

-- What a row does not say.
local DEFAULTS = { __index = {
  owner = '', gateway = '', preferred = '', facts = '', worker = '', cancelled = '', trail = '', saver = '',
  refused = '', patience_ms = 0, deadline_ms = 0, first_ms = 0, passed_ms = 0, refused_ms = 0,
  input = 0, need = 0, most = 0, served = 0, losses = 0, weight = 1,
  rerunnable = true, shown = false, held = false, bodied = false, background = false,
} }

local function read(id, packed)
  local row = packed and setmetatable(cmsgpack.unpack(packed), DEFAULTS) or nil
  rows[id] = row
  return row
end

local function row_of(id) return rows[id] or read(id, call('HGET', ROWS, id)) end

local function look_up(ids) -- many rows at once, for `row_of`
  for from = 1, #ids, 500 do
    local found = call('HMGET', ROWS, unpack(ids, from, math.min(from + 499, #ids)))
    for i, packed in ipairs(found) do
      local id = ids[from + i - 1]
      if not rows[id] then read(id, packed) end
    end
  end
end

local function keep(id, row) rows[id], changed[id] = row, true end

local function count(name, by) counts[name] = (counts[name] or 0) + by end

local function counter(name)
  if not counters[name] then counters[name] = tonumber(call('HGET', COUNTERS, name) or '0') end
  return counters[name] + (counts[name] or 0)
end

local function read_stops(packed) -- 'mark|p or nothing|classes that are shed'
  local mark, paused, shed = string.match(packed or '', '^([^|]*)|(p?)|(%d*)$')
  stops = { mark = mark or '', paused = paused == 'p', shed = shed or '' }
end

local function stopped()
  if not stops then read_stops(call('HGET', COUNTERS, 'stops')) end
  return stops
end

local function is_shed(class) return string.find(stopped().shed, class, 1, true) ~= nil end

-- An operator shed its class, so it waits no longer. Background work, of which everybody was promised an end, does.
local function sheds(row) return not row.background and is_shed(row.class) end

local function look_at(...) -- many counters at once, for `counter` and `stopped`
  local names = { ... }
  for i, value in ipairs(call('HMGET', COUNTERS, ...)) do
    if names[i] == 'stops' then read_stops(value) else counters[names[i]] = tonumber(value or '0') end
  end
end

local function note(name, value) -- a counter that is set
  counters[name] = value
  call('HSET', COUNTERS, name, value)
end

local function many(verb, key, words) -- one command for all; in pieces, since Lua's stack is bounded
  for from = 1, #words, 1000 do call(verb, key, unpack(words, from, math.min(from + 999, #words))) end
end

local function settle()
  local packed, forget = {}, {}
  for id in pairs(changed) do
    packed[#packed + 1] = id
    packed[#packed + 1] = cmsgpack.pack(rows[id])
  end
  many('HSET', ROWS, packed)
  for i, id in ipairs(ended) do forget[2 * i - 1], forget[2 * i] = now + FORGET_MS, id end
  many('ZADD', FORGET, forget)
  many('HDEL', TASKS, ended)
  for name, by in pairs(counts) do
    if by ~= 0 then call('HINCRBY', COUNTERS, name, by) end
  end
  for worker, sum in pairs(sums) do call('HSET', SUMS, worker, string.format('%.0f', sum)) end
  for tenant, added in pairs(depths) do
    if call('HINCRBY', DEPTHS, tenant, added[1]) == 0 then call('HDEL', DEPTHS, tenant, tenant .. '|tokens')
    else call('HINCRBY', DEPTHS, tenant .. '|tokens', added[2]) end
  end
end

local function wake() call('ZADD', WAKE, 0, '0') end

-- A worker's claims have a sum, so that its beat carries one number instead of every id. What a worker must know of a
-- claim is part of the mark: whatever it missed, it learns at its next beat.
local function sum_of(worker) return sums[worker] or tonumber(call('HGET', SUMS, worker) or '0') end

local function add_sum(worker, id, row, sign)
  local mark = id .. '#' .. row.attempt .. (row.cancelled ~= '' and '#c' or '') .. '@' .. row.gateway
  local hash = tonumber(string.sub(redis.sha1hex(mark), 1, 12), 16)
  sums[worker] = (sum_of(worker) + sign * hash) % SUM_MODULUS
end

-- Change what the mark of a claim is made of, and tell its worker: 'cancel|id' or 'home|id|gateway'.
local function tell(id, row, change, message)
  add_sum(row.worker, id, row, -1)
  change(row)
  add_sum(row.worker, id, row, 1)
  keep(id, row)
  call('PUBLISH', PREFIX .. 'worker:' .. row.worker, message)
end
