// A client in Node without generated code. `client.js ADDRESS PROTOS` makes the calls that test_generated_clients.py
// lists, with the tensors on stdin, and prints a JSON report.

import { Buffer } from 'node:buffer'
import { readFileSync } from 'node:fs'
import process from 'node:process'
import grpc from '@grpc/grpc-js'
import loader from '@grpc/proto-loader'
import { decode, encode, fromContents, hasContents, toContents } from './tensors.js'

const WAIT = 60_000 // milliseconds, for what must come
const SLOW = 24000 // the probe's work: some seconds
const STREAMED = 200
const BAD = 11 // the place of the request in the stream that fails
const CONCURRENT = 100
const LARGE = 2_000_000 // elements of FP32: above gRPC's default limit of 4 MiB
const OPTIONS = { 'grpc.max_receive_message_length': 64 << 20 }

const [address, protos] = process.argv.slice(2)
const definition = loader.loadSync('tensorferry/protos/inference.proto', {
  includeDirs: [protos], keepCase: true, longs: String, defaults: true,
})
const { GRPCInferenceService } = grpc.loadPackageDefinition(definition).inference
const connect = (options = {}) =>
  new GRPCInferenceService(address, grpc.credentials.createInsecure(), { ...OPTIONS, ...options })
const client = connect()

const within = (milliseconds) => ({ deadline: Date.now() + milliseconds })

const call = (method, request, { limit = WAIT, from = client, meanwhile = () => {} } = {}) =>
  new Promise((resolve, reject) => {
    const begun = from[method](request, within(limit), (error, response) => error ? reject(error) : resolve(response))
    meanwhile(begun)
  })

const failure = (answer) => answer.then(
  () => ({ code: 0, message: '' }),
  (error) => ({ code: error.code, message: error.details }),
)

// A request to the probe model: y = 2 tag + index, after `work`.
function probe (tag, index = 0, work = 0) {
  return {
    model_name: 'probe',
    inputs: [
      { name: 'x', datatype: 'FP32', shape: [1, 4] },
      { name: 'index', datatype: 'INT64', shape: [1] },
      { name: 'work', datatype: 'INT64', shape: [1] },
    ],
    raw_input_contents: [encode('FP32', Array(4).fill(tag)), encode('INT64', [index]), encode('INT64', [work])],
  }
}

const first = (response) => response.raw_output_contents[0].readFloatLE(0)

const infer = async (request, from = client) => first(await call('ModelInfer', request, { from }))

const echo = (datatype, input, raw = []) => call('ModelInfer', {
  model_name: `echo-${datatype}`, inputs: [{ name: 'x', datatype, ...input }], raw_input_contents: raw,
})

async function echoRaw (datatype, texts) {
  const response = await echo(datatype, { shape: [2, texts.length / 2] }, [encode(datatype, texts)])
  return decode(datatype, response.raw_output_contents[0])
}

async function echoTyped (datatype, texts) {
  const response = await echo(datatype, { shape: [2, texts.length / 2], contents: toContents(datatype, texts) })
  return fromContents(datatype, response.outputs[0].contents)
}

// Health and metadata of the server and of a model.
async function described () {
  const server = await call('ServerMetadata', {})
  const model = await call('ModelMetadata', { name: 'probe' })
  const ready = async (name) => (await call('ModelReady', { name })).ready
  const signature = (tensors) => tensors.map(({ name, datatype, shape }) => [name, datatype, shape.map(Number)])
  return {
    live: (await call('ServerLive', {})).live,
    ready: (await call('ServerReady', {})).ready,
    server: { name: server.name, extensions: server.extensions },
    model_ready: { probe: await ready('probe'), nobody: await ready('nobody') },
    metadata: {
      name: model.name,
      versions: model.versions,
      platform: model.platform,
      inputs: signature(model.inputs),
      outputs: signature(model.outputs),
    },
  }
}

// The names of the parameters that describe a batch, and one of the values.
async function parameters () {
  const request = { ...probe(1), parameters: { explain: { bool_param: true } } }
  const said = (await call('ModelInfer', request)).parameters
  return { names: Object.keys(said).sort(), batch_rows: Number(said.batch_rows.int64_param) }
}

async function gzip () {
  const compressing = connect({ 'grpc.default_compression_algorithm': grpc.compressionAlgorithms.gzip })
  const answer = await infer(probe(7), compressing)
  compressing.close()
  return answer
}

async function large () {
  const sent = Float32Array.from({ length: LARGE }, (_, place) => place)
  const bytes = Buffer.from(sent.buffer)
  return bytes.equals((await echo('FP32', { shape: [1, LARGE] }, [bytes])).raw_output_contents[0])
}

function stream () {
  return new Promise((resolve, reject) => {
    const answers = []
    const open = client.ModelStreamInfer(within(WAIT))
    open.on('error', reject)
    open.on('end', () => resolve(answers))
    open.on('data', ({ error_message: error, infer_response: response }) => {
      answers.push({ id: response.id, y: error === '' ? first(response) : 0, error })
    })
    for (let place = 0; place < STREAMED; place++) {
      open.write({ ...probe(place, place === BAD ? 99 : 0), id: `r${place}` })
    }
    open.end()
  })
}

function streamCancelled () {
  return new Promise((resolve, reject) => {
    const open = client.ModelStreamInfer(within(WAIT))
    open.on('error', reject)
    open.on('end', resolve)
    open.once('data', () => {
      open.write(probe(1, 0, SLOW))
      open.cancel()
    })
    open.write(probe(1))
  })
}

async function failures () {
  const misshapen = probe(1)
  misshapen.inputs[0].shape = [4]
  const half = { name: 'x', datatype: 'FP16', shape: [1, 1], contents: toContents('FP32', ['1']) }
  const leave = (begun) => setTimeout(() => begun.cancel(), 50)
  return {
    shape: await failure(call('ModelInfer', misshapen)),
    half: await failure(call('ModelInfer', { model_name: 'echo-FP16', inputs: [half] })),
    nobody: await failure(call('ModelInfer', { ...probe(1), model_name: 'nobody' })),
    raised: await failure(call('ModelInfer', probe(1, 99))),
    deadline: await failure(call('ModelInfer', probe(1, 0, SLOW), { limit: 100 })),
    cancelled: await failure(call('ModelInfer', probe(1, 0, SLOW), { meanwhile: leave })),
    stream_cancelled: await failure(streamCancelled()),
  }
}

const raw = {}
const typed = {}
for (const [datatype, texts] of Object.entries(JSON.parse(readFileSync(0, 'utf8')))) {
  raw[datatype] = await echoRaw(datatype, texts)
  if (hasContents(datatype)) typed[datatype] = await echoTyped(datatype, texts)
}
const report = {
  ...await described(),
  raw,
  typed,
  parameters: await parameters(),
  gzip: await gzip(),
  large: await large(),
  concurrent: await Promise.all(Array.from({ length: CONCURRENT }, (_, tag) => infer(probe(tag)))),
  stream: await stream(),
  errors: await failures(),
  after: await infer(probe(8)),
}
client.close()
process.stdout.write(JSON.stringify(report))
