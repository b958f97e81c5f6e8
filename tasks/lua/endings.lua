-- endings: the one way out. Completion, cancel, expiry and lost workers all end in `conclude`.

local function release(id, row) -- the claim that the row's worker has on it
  call('ZREM', CLAIMS, row.worker .. '|' .. id)
  add_sum(row.worker, id, row, -1)
end

local function withdraw(id, row) -- from wherever it is
  if row.state == 'waiting' then leave(id, row)
  elseif row.state == 'delayed' then call('ZREM', DELAYS, id)
  elseif row.state == 'running' then release(id, row) end
end

local NOTHING = { input_tokens = 0, cached_tokens = 0, output_tokens = 0, reasoning_tokens = 0 }

-- All or nothing: terminal record, claim, terminal frame, usage entry. A row is concluded once: it is 'ended' then.
local function conclude(id, row, outcome, usage, message)
  withdraw(id, row)
  call('HDEL', TASKS, id)
  call('ZADD', FORGET, now + FORGET_MS, id)
  count('ended', 1)
  if row.facts ~= '' then
    call('XADD', USAGE, '*', 'id', id, 'attempt', row.attempt, 'outcome', outcome, 'worker', row.worker,
      'input', usage.input_tokens, 'cached', usage.cached_tokens,
      'output', usage.output_tokens, 'reasoning', usage.reasoning_tokens, 'facts', row.facts)
  end
  local ending = { id = id, attempt = row.attempt, outcome = outcome, usage = usage, message = message, ended_ms = now }
  keep(id, { state = 'ended', attempt = row.attempt, worker = row.worker, ending = ending })
  if row.gateway ~= '' then
    call('PUBLISH', PREFIX .. 'gateway:' .. row.gateway, cmsgpack.pack({ v = 1, endings = { ending } }))
  end
end

-- The worker no longer has it: run it again if that cannot show, else end it with the reason.
local function back(id, row, message)
  if row.cancelled then return conclude(id, row, 'cancelled', NOTHING, message) end
  if row.first_ms > 0 and not row.rerunnable then return conclude(id, row, 'worker_lost', NOTHING, message) end
  if row.losses >= LOSSES_MAX then return conclude(id, row, 'failed', NOTHING, 'it ended its worker ' .. LOSSES_MAX .. ' times') end
  release(id, row)
  row.worker = ''
  row.first_ms = 0
  row.served = 0
  join(id, row)
  keep(id, row)
end

local function claims_of(worker, limit)
  local first = '[' .. worker .. '|'
  local ids = {}
  for _, claim in ipairs(call('ZRANGEBYLEX', CLAIMS, first, first .. '\255', 'LIMIT', 0, limit)) do
    ids[#ids + 1] = string.match(claim, '([^|]*)$')
  end
  return ids
end

-- A worker is dead. Takes back at most `limit` claims; returns whether none is left.
local function bury(worker, limit)
  local ids = claims_of(worker, limit)
  for _, id in ipairs(ids) do
    local row = row_of(id)
    row.losses = row.losses + 1
    count('lost', 1)
    back(id, row, 'its worker died')
  end
  if #ids == limit then return false end
  call('ZREM', LEASES, worker)
  call('HDEL', SUMS, worker)
  call('HDEL', NONCES, worker)
  return true
end

-- After a silence of everybody the store was away: every lease gets its full time again before any is reaped.
local function hear()
  local last = tonumber(call('HGET', COUNTERS, 'heard_ms') or now)
  if now - last > SILENCE_MS then call('HSET', COUNTERS, 'mercy_ms', now + counter('lease_ms')) end
  call('HSET', COUNTERS, 'heard_ms', now)
end

-- Bounded housekeeping, run inside every claim, beat, watch and tick: nothing in the queue waits for a timer process.
local function timers(limit)
  hear()
  for _, id in ipairs(call('ZRANGEBYSCORE', DELAYS, '-inf', now, 'LIMIT', 0, limit)) do
    call('ZREM', DELAYS, id)
    local row = row_of(id)
    join(id, row)
    keep(id, row)
  end
  for _, id in ipairs(call('ZRANGEBYSCORE', DEADLINES, '-inf', now, 'LIMIT', 0, limit)) do
    conclude(id, row_of(id), 'expired', NOTHING, 'its deadline passed while it waited')
  end
  for _, id in ipairs(call('ZRANGEBYSCORE', FORGET, '-inf', now, 'LIMIT', 0, limit)) do
    call('ZREM', FORGET, id)
    call('HDEL', ROWS, id)
  end
  if now < counter('mercy_ms') then return end
  for _, worker in ipairs(call('ZRANGEBYSCORE', LEASES, '-inf', now, 'LIMIT', 0, 4)) do bury(worker, limit) end
end
