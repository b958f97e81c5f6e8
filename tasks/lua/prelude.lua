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
local SILENCE_MS = 1500  -- no script from anybody for this long: the store was away, not its workers
local LOSSES_MAX = 3     -- a request that took this many workers down with it is a dead letter
local OVERDUE_EVERY = 16 -- one claim in so many goes to whoever is overdue longest, of any class
local SAVE_MS = 2000     -- a request passed over for its size so long gets a worker that saves KV cache for it
local HELD_MS = 900000   -- a request that came while no worker was alive waits at most this long for one
local DEAD_MS = 604800000 -- a dead letter is kept a week
local DEAD_MAX = 10000   -- and at most so many are
local CLASS_STRIDE = 70368744177664 -- 2^46: the class in a tenant's score
local SUM_MODULUS = 281474976710656 -- 2^48: sums stay exact in a double

local now = now_ms()

local function row_of(id)
  local packed = call('HGET', ROWS, id)
  if packed then return cmsgpack.unpack(packed) end
end

local function keep(id, row) call('HSET', ROWS, id, cmsgpack.pack(row)) end

local function count(name, by) call('HINCRBY', COUNTERS, name, by) end

local function counter(name) return tonumber(call('HGET', COUNTERS, name) or '0') end

local function wake() call('ZADD', WAKE, 0, '0') end

-- A worker's claims have a sum, so that its beat carries one number instead of every id. What a worker must know of a
-- claim is part of the mark: whatever it missed, it learns at its next beat.
local function add_sum(worker, id, row, sign)
  local mark = id .. '#' .. row.attempt .. (row.cancelled ~= '' and '#c' or '') .. '@' .. row.gateway
  local hash = tonumber(string.sub(redis.sha1hex(mark), 1, 12), 16)
  local sum = tonumber(call('HGET', SUMS, worker) or '0')
  call('HSET', SUMS, worker, string.format('%.0f', (sum + sign * hash) % SUM_MODULUS))
end

-- Change what the mark of a claim is made of, and tell its worker: 'cancel|id' or 'home|id|gateway'.
local function tell(id, row, change, message)
  add_sum(row.worker, id, row, -1)
  change(row)
  add_sum(row.worker, id, row, 1)
  keep(id, row)
  call('PUBLISH', PREFIX .. 'worker:' .. row.worker, message)
end
