// A client in Go with generated code. `client ADDRESS` makes the calls that test_generated_clients.py lists, with the
// tensors on stdin, and prints a JSON report.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log"
	"os"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/status"

	pb "wire/inference"
)

const (
	wait       = 60 * time.Second // for what must come
	slow       = 24000            // the probe's work: some seconds
	streamed   = 200
	bad        = 11 // the place of the request in the stream that fails
	concurrent = 100
	largeCount = 2_000_000 // elements of FP32: above gRPC's default limit of 4 MiB
)

type failure struct {
	Code    int    `json:"code"`
	Message string `json:"message"`
}

type answer struct {
	ID    string  `json:"id"`
	Y     float32 `json:"y"`
	Error string  `json:"error"`
}

type client struct {
	stub pb.GRPCInferenceServiceClient
}

func main() {
	var tensors map[string][]string
	check(json.NewDecoder(os.Stdin).Decode(&tensors))
	connection, err := grpc.NewClient(os.Args[1],
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)))
	check(err)
	defer connection.Close()
	c := client{pb.NewGRPCInferenceServiceClient(connection)}

	raw, typed := map[string][]string{}, map[string][]string{}
	for datatype, values := range tensors {
		raw[datatype] = c.echoRaw(datatype, values)
		if hasContents(datatype) {
			typed[datatype] = c.echoTyped(datatype, values)
		}
	}
	report := map[string]any{
		"raw":        raw,
		"typed":      typed,
		"parameters": c.parameters(),
		"gzip":       c.infer(probe(7, 0, 0), grpc.UseCompressor(gzip.Name)),
		"large":      c.large(),
		"concurrent": c.concurrent(),
		"stream":     c.stream(),
		"errors":     c.failures(),
		"after":      c.infer(probe(8, 0, 0)),
	}
	c.describe(report)
	check(json.NewEncoder(os.Stdout).Encode(report))
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func within(limit time.Duration) context.Context {
	ctx, release := context.WithTimeout(context.Background(), limit)
	context.AfterFunc(ctx, release)
	return ctx
}

func failed(err error) failure {
	if err == nil {
		return failure{}
	}
	return failure{int(status.Code(err)), status.Convert(err).Message()}
}

// Health and metadata of the server and of a model.
func (c client) describe(report map[string]any) {
	live, err := c.stub.ServerLive(within(wait), &pb.ServerLiveRequest{})
	check(err)
	ready, err := c.stub.ServerReady(within(wait), &pb.ServerReadyRequest{})
	check(err)
	server, err := c.stub.ServerMetadata(within(wait), &pb.ServerMetadataRequest{})
	check(err)
	models := map[string]bool{}
	for _, name := range []string{"probe", "nobody"} {
		model, err := c.stub.ModelReady(within(wait), &pb.ModelReadyRequest{Name: name})
		check(err)
		models[name] = model.Ready
	}
	metadata, err := c.stub.ModelMetadata(within(wait), &pb.ModelMetadataRequest{Name: "probe"})
	check(err)
	signature := func(tensors []*pb.ModelMetadataResponse_TensorMetadata) []any {
		described := []any{}
		for _, tensor := range tensors {
			described = append(described, []any{tensor.Name, tensor.Datatype, tensor.Shape})
		}
		return described
	}
	report["live"], report["ready"], report["model_ready"] = live.Live, ready.Ready, models
	report["server"] = map[string]any{"name": server.Name, "extensions": server.Extensions}
	report["metadata"] = map[string]any{
		"name": metadata.Name, "versions": metadata.Versions, "platform": metadata.Platform,
		"inputs": signature(metadata.Inputs), "outputs": signature(metadata.Outputs),
	}
}

// A request to the probe model: y = 2 tag + index, after `work`.
func probe(tag float32, index, work int64) *pb.ModelInferRequest {
	input := func(name, datatype string, shape ...int64) *pb.ModelInferRequest_InferInputTensor {
		return &pb.ModelInferRequest_InferInputTensor{Name: name, Datatype: datatype, Shape: shape}
	}
	return &pb.ModelInferRequest{
		ModelName:        "probe",
		Inputs:           []*pb.ModelInferRequest_InferInputTensor{input("x", "FP32", 1, 4), input("index", "INT64", 1), input("work", "INT64", 1)},
		RawInputContents: [][]byte{packed([]float32{tag, tag, tag, tag}), packed([]int64{index}), packed([]int64{work})},
	}
}

func first(response *pb.ModelInferResponse) float32 {
	return unpacked[float32](response.RawOutputContents[0])[0]
}

func (c client) infer(request *pb.ModelInferRequest, options ...grpc.CallOption) float32 {
	response, err := c.stub.ModelInfer(within(wait), request, options...)
	check(err)
	return first(response)
}

func (c client) echo(datatype string, input *pb.ModelInferRequest_InferInputTensor, raw ...[]byte) *pb.ModelInferResponse {
	input.Name, input.Datatype = "x", datatype
	response, err := c.stub.ModelInfer(within(wait), &pb.ModelInferRequest{
		ModelName:        "echo-" + datatype,
		Inputs:           []*pb.ModelInferRequest_InferInputTensor{input},
		RawInputContents: raw,
	})
	check(err)
	return response
}

func (c client) echoRaw(datatype string, values []string) []string {
	input := &pb.ModelInferRequest_InferInputTensor{Shape: []int64{2, int64(len(values) / 2)}}
	return decode(datatype, c.echo(datatype, input, encode(datatype, values)).RawOutputContents[0])
}

func (c client) echoTyped(datatype string, values []string) []string {
	input := &pb.ModelInferRequest_InferInputTensor{Shape: []int64{2, int64(len(values) / 2)}, Contents: toContents(datatype, values)}
	return fromContents(datatype, c.echo(datatype, input).Outputs[0].Contents)
}

// The names of the parameters that describe a batch, and one of the values.
func (c client) parameters() map[string]any {
	request := probe(1, 0, 0)
	request.Parameters = map[string]*pb.InferParameter{"explain": {ParameterChoice: &pb.InferParameter_BoolParam{BoolParam: true}}}
	response, err := c.stub.ModelInfer(within(wait), request)
	check(err)
	names := []string{}
	for name := range response.Parameters {
		names = append(names, name)
	}
	slices.Sort(names)
	return map[string]any{"names": names, "batch_rows": response.Parameters["batch_rows"].GetInt64Param()}
}

func (c client) large() bool {
	sent := make([]float32, largeCount)
	for place := range sent {
		sent[place] = float32(place)
	}
	input := &pb.ModelInferRequest_InferInputTensor{Shape: []int64{1, largeCount}}
	return slices.Equal(sent, unpacked[float32](c.echo("FP32", input, packed(sent)).RawOutputContents[0]))
}

func (c client) concurrent() []float32 {
	answers := make([]float32, concurrent)
	var calls sync.WaitGroup
	for tag := range concurrent {
		calls.Add(1)
		go func() {
			defer calls.Done()
			answers[tag] = c.infer(probe(float32(tag), 0, 0))
		}()
	}
	calls.Wait()
	return answers
}

func (c client) stream() []answer {
	stream, err := c.stub.ModelStreamInfer(within(wait))
	check(err)
	go func() {
		for place := range streamed {
			request := probe(float32(place), 0, 0)
			if place == bad {
				request = probe(float32(place), 99, 0)
			}
			request.Id = "r" + text(place)
			check(stream.Send(request))
		}
		check(stream.CloseSend())
	}()
	answers := []answer{}
	for {
		response, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return answers
		}
		check(err)
		got := answer{ID: response.InferResponse.Id, Error: response.ErrorMessage}
		if got.Error == "" {
			got.Y = first(response.InferResponse)
		}
		answers = append(answers, got)
	}
}

func (c client) failures() map[string]failure {
	call := func(ctx context.Context, request *pb.ModelInferRequest) failure {
		_, err := c.stub.ModelInfer(ctx, request)
		return failed(err)
	}
	misshapen, nobody := probe(1, 0, 0), probe(1, 0, 0)
	misshapen.Inputs[0].Shape = []int64{4}
	nobody.ModelName = "nobody"
	half := &pb.ModelInferRequest{ModelName: "echo-FP16", Inputs: []*pb.ModelInferRequest_InferInputTensor{{
		Name: "x", Datatype: "FP16", Shape: []int64{1, 1}, Contents: toContents("FP32", []string{"1"}),
	}}}
	failures := map[string]failure{
		"shape":    call(within(wait), misshapen),
		"half":     call(within(wait), half),
		"nobody":   call(within(wait), nobody),
		"raised":   call(within(wait), probe(1, 99, 0)),
		"deadline": call(within(100*time.Millisecond), probe(1, 0, slow)),
	}
	left, leave := context.WithCancel(within(wait))
	time.AfterFunc(50*time.Millisecond, leave)
	failures["cancelled"] = call(left, probe(1, 0, slow))

	ctx, end := context.WithCancel(within(wait))
	stream, err := c.stub.ModelStreamInfer(ctx)
	check(err)
	check(stream.Send(probe(1, 0, 0)))
	_, err = stream.Recv()
	check(err)
	check(stream.Send(probe(1, 0, slow)))
	end()
	_, err = stream.Recv()
	failures["stream_cancelled"] = failed(err)
	return failures
}
