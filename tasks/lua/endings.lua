-- endings: the one way out. Completion, cancel, expiry, lost workers and lost gateways all end in `conclude`.

local function release(id, row) -- the claim that the row's worker has on it
  call('ZREM', CLAIMS, row.worker .. '|' .. id)
  add_sum(row.worker, id, row, -1)
end

local function withdraw(id, row) -- from wherever it is
  if row.state == 'waiting' then leave(id, row)
  elseif row.state == 'delayed' then call('ZREM', DELAYS, id)
  elseif row.state == 'running' then release(id, row) end
end

local SHED = 'an operator shed its class'
local NOTHING = { input_tokens = 0, cached_tokens = 0, output_tokens = 0, reasoning_tokens = 0 }

-- All or nothing: terminal record, claim, terminal frame, usage entry. A row is concluded once: it is 'ended' then.
local function conclude(id, row, outcome, usage, message)
  withdraw(id, row)
  ended[#ended + 1] = id
  if row.facts ~= '' then
    call('XADD', USAGE, '*', 'id', id, 'attempt', row.attempt, 'outcome', outcome, 'worker', row.worker,
      'input', usage.input_tokens, 'cached', usage.cached_tokens,
      'output', usage.output_tokens, 'reasoning', usage.reasoning_tokens, 'facts', row.facts)
  end
  local ending = { id = id, attempt = row.attempt, outcome = outcome, usage = usage, message = message, ended_ms = now }
  local over = { state = 'ended', attempt = row.attempt, worker = row.worker, owner = row.owner, ending = ending }
  if row.trail ~= '' then over.trail = row.trail end -- not all that was delivered is saved yet
  keep(id, over)
  if row.gateway ~= '' then
    call('ZREM', HOMES, row.gateway .. '|' .. id)
    call('PUBLISH', PREFIX .. 'gateway:' .. row.gateway, cmsgpack.pack({ v = 1, endings = { ending } }))
  end
end

local function bury_letter(id)
  call('ZREM', DEAD, id)
  call('HDEL', LETTERS, id)
end

-- Given up, and kept for a person to look at: the row as it was, its message, why.
local function dead_letter(id, row, message)
  local letter = { row = row, message = call('HGET', TASKS, id) or '', reason = message, dead_ms = now }
  call('HSET', LETTERS, id, cmsgpack.pack(letter))
  call('ZADD', DEAD, now, id)
  if call('ZCARD', DEAD) > DEAD_MAX then bury_letter(call('ZRANGE', DEAD, 0, 0)[1]) end
end

-- Its wait begins now, and with it its patience: what ran until a moment ago has not waited.
local function be_patient(row) row.deadline_ms = row.patience_ms > 0 and now + row.patience_ms or 0 end

-- The worker no longer has it: another goes on with it if that cannot show, else it ends with the reason.
local function back(id, row, message)
  if row.cancelled ~= '' then return conclude(id, row, row.cancelled, NOTHING, message) end
  if row.shown and not row.rerunnable then return conclude(id, row, 'worker_lost', NOTHING, message) end
  if row.losses >= LOSSES_MAX then
    local reason = 'it ended its worker ' .. LOSSES_MAX .. ' times'
    dead_letter(id, row, reason)
    return conclude(id, row, 'failed', NOTHING, reason)
  end
  if sheds(row) then return conclude(id, row, 'shed', NOTHING, SHED) end
  release(id, row)
  -- Whose log holds what was delivered and is not saved yet. Who delivers has saved all before it (deliver.lua).
  if row.first_ms > 0 then row.trail = row.worker end
  row.worker, row.first_ms, row.passed_ms, row.refused = '', 0, 0, ''
  be_patient(row)
  join(id, row)
  keep(id, row)
  wake()
end

local function claims_of(worker, limit)
  local first = '[' .. worker .. '|'
  local ids = {}
  for _, claim in ipairs(call('ZRANGEBYLEX', CLAIMS, first, first .. '\255', 'LIMIT', 0, limit)) do
    ids[#ids + 1] = id_of(claim)
  end
  return ids
end

local function forget_worker(worker)
  call('ZREM', LEASES, worker)
  call('HDEL', SUMS, worker)
  sums[worker] = nil
  call('HDEL', NONCES, worker)
  call('HDEL', ROOMS, worker)
  local saved = call('HGET', SAVING, worker)
  if saved then
    call('HDEL', SAVING, worker)
    local row = row_of(saved)
    row.saver = ''
    keep(saved, row)
  end
end

-- Its worker died, perhaps of it; hardly so if it had made tokens there: else whoever ran beside a poison fell with it.
local function lose(row)
  count('lost', 1)
  if row.first_ms == 0 or row.attempt >= ATTEMPTS_MAX then row.losses = row.losses + 1 end
end

-- A worker is gone. Takes back at most `limit` claims; returns whether none is left. `died`: they may have been why.
local function bury(worker, limit, died)
  local ids = claims_of(worker, limit)
  look_up(ids)
  for _, id in ipairs(ids) do
    local row = row_of(id)
    if died then lose(row) end
    back(id, row, 'its worker died')
  end
  if #ids == limit then return false end
  forget_worker(worker)
  return true
end

-- The running request is to stop, for `reason` (an outcome). Its worker ends it, or the reaper does.
local function stop(id, row, reason)
  if row.cancelled ~= '' then return end
  tell(id, row, function(r) r.cancelled = reason end, 'cancel|' .. id)
end

-- Its stream is open at this gateway from now on ('' : at none), which its worker is told.
local function move(id, row, gateway)
  if row.gateway == gateway then return end
  call('ZREM', HOMES, row.gateway .. '|' .. id)
  if gateway ~= '' then call('ZADD', HOMES, 0, gateway .. '|' .. id) end
  if row.state == 'running' then
    tell(id, row, function(r) r.gateway = gateway end, 'home|' .. id .. '|' .. gateway)
  else
    row.gateway = gateway
    keep(id, row)
  end
end

-- A gateway is gone, and nobody has attached to what was open there. Background work goes on without a reader.
local function orphan(gateway, limit)
  local first = '[' .. gateway .. '|'
  local homes = call('ZRANGEBYLEX', HOMES, first, first .. '\255', 'LIMIT', 0, limit)
  for _, home in ipairs(homes) do
    local id = id_of(home)
    local row = row_of(id)
    if row.background then move(id, row, '')
    elseif row.state == 'running' then stop(id, row, 'gateway_lost')
    else conclude(id, row, 'gateway_lost', NOTHING, 'its gateway died and nobody came for it') end
    call('ZREM', HOMES, home)
  end
  if #homes < limit then call('ZREM', GATEWAYS, gateway) end
end

-- The store's clock was set back, as when another primary takes over: no lease may last the longer for it.
local function set_back(by_ms)
  for _, key in ipairs({ LEASES, GATEWAYS }) do
    for _, name in ipairs(call('ZRANGE', key, 0, -1)) do call('ZINCRBY', key, 0 - by_ms, name) end
  end
end

-- Called before a lease is renewed. After a silence of everybody the store was away: every lease gets its full time
-- again before any is reaped.
local function hear()
  look_at('heard_ms', 'lease_ms', 'mercy_ms', 'stops', 'searches', 'waiting_preferred')
  local last, lease_ms = counter('heard_ms'), counter('lease_ms')
  if last == 0 then last = now end -- nobody was heard yet
  if now < last then set_back(last - now) end
  if now < last or now - last > math.max(SILENCE_MS, lease_ms / 2) then
    note('mercy_ms', now + math.max(lease_ms, MERCY_MS))
  end
  note('heard_ms', now)
end

-- Nobody is there to run it: its own deadline will begin when somebody is.
local function hold(id, row)
  row.held, row.deadline_ms = true, now + (row.background and KEPT_MS or HELD_MS)
  call('ZADD', HELD, row.arrival, id)
end

local function release_held(limit)
  for _, id in ipairs(call('ZRANGE', HELD, 0, limit - 1)) do
    call('ZREM', HELD, id)
    local row = row_of(id)
    row.held = false
    be_patient(row)
    if row.deadline_ms > 0 then call('ZADD', DEADLINES, row.deadline_ms, id) else call('ZREM', DEADLINES, id) end
    keep(id, row)
  end
end

-- What waited of a class when it was shed ends, some at a time. `sweep<class>` is where to go on: there is none when
-- nothing is left to end.
local function shed_some(class, from, limit)
  local ids = {}
  local entries = call('ZRANGEBYLEX', WAITING, from, '[' .. class .. '|\255', 'LIMIT', 0, limit)
  for i, entry in ipairs(entries) do ids[i] = id_of(entry) end
  look_up(ids)
  for _, id in ipairs(ids) do
    local row = row_of(id)
    if sheds(row) then conclude(id, row, 'shed', NOTHING, SHED) end
  end
  if #entries < limit then call('HDEL', COUNTERS, 'sweep' .. class)
  else call('HSET', COUNTERS, 'sweep' .. class, '(' .. entries[limit]) end
  return limit - #entries
end

local function sweep(limit) -- returns whether something may be left to end
  for class in string.gmatch(stopped().shed, '%d') do
    local from = call('HGET', COUNTERS, 'sweep' .. class)
    if from then limit = shed_some(class, from, limit) end
    if limit <= 0 then return true end
  end
  return false
end

-- Bounded housekeeping, run inside every claim, beat, watch and tick: nothing in the queue waits for a timer process.
local function timers(limit)
  local alive = call('ZCARD', LEASES) > 0
  if alive then release_held(limit) end
  for _, id in ipairs(call('ZRANGEBYSCORE', DELAYS, '-inf', now, 'LIMIT', 0, limit)) do
    call('ZREM', DELAYS, id)
    local row = row_of(id)
    if sheds(row) then
      conclude(id, row, 'shed', NOTHING, SHED)
    else
      be_patient(row)
      join(id, row)
      keep(id, row)
      wake()
    end
  end
  sweep(limit)
  for _, id in ipairs(call('ZRANGEBYSCORE', DEADLINES, '-inf', now, 'LIMIT', 0, limit)) do
    local row = row_of(id)
    if alive or row.held then
      conclude(id, row, 'expired', NOTHING, 'its deadline passed while it waited')
    else -- the last worker went while it waited
      hold(id, row)
      call('ZADD', DEADLINES, row.deadline_ms, id)
      keep(id, row)
    end
  end
  for _, id in ipairs(call('ZRANGEBYSCORE', FORGET, '-inf', now, 'LIMIT', 0, limit)) do
    call('ZREM', FORGET, id)
    call('HDEL', ROWS, id)
    rows[id], changed[id] = nil, nil
  end
  for _, id in ipairs(call('ZRANGEBYSCORE', DEAD, '-inf', now - DEAD_MS, 'LIMIT', 0, limit)) do bury_letter(id) end
  if now < counter('mercy_ms') then return end
  for _, worker in ipairs(call('ZRANGEBYSCORE', LEASES, '-inf', now, 'LIMIT', 0, 4)) do bury(worker, limit, true) end
  for _, gateway in ipairs(call('ZRANGEBYSCORE', GATEWAYS, '-inf', now, 'LIMIT', 0, 1)) do orphan(gateway, limit) end
end
