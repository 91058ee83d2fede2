// A client in Go with net/http alone. `http_client URL` makes the calls that test_programs.py lists, and prints a JSON
// report.
package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"io"
	"log"
	"net/http"
	"net/http/httptrace"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
)

type object = map[string]any

const (
	lengthHeader = "Inference-Header-Content-Length"
	concurrent   = 50
	largeCount   = 2_000_000
)

var opened atomic.Int64

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// Returns the status, the JSON and the bytes after it of the answer to a request with a JSON head and bytes after it.
func infer(model string, head object, raw []byte) (int, object, []byte) {
	body, err := json.Marshal(head)
	check(err)
	length := strconv.Itoa(len(body))
	request, err := http.NewRequest("POST", os.Args[1]+"/v2/models/"+model+"/infer", bytes.NewReader(append(body, raw...)))
	check(err)
	if raw != nil {
		request.Header.Set(lengthHeader, length)
	}
	trace := &httptrace.ClientTrace{GotConn: func(info httptrace.GotConnInfo) {
		if !info.Reused {
			opened.Add(1)
		}
	}}
	response, err := http.DefaultClient.Do(request.WithContext(httptrace.WithClientTrace(request.Context(), trace)))
	check(err)
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	check(err)
	end := len(answer)
	if value := response.Header.Get(lengthHeader); value != "" {
		end, err = strconv.Atoi(value)
		check(err)
	}
	fields := object{}
	check(json.Unmarshal(answer[:end], &fields))
	return response.StatusCode, fields, answer[end:]
}

func input(values []float32, more object) object {
	given := object{"name": "x", "datatype": "FP32", "shape": []int{1, len(values)}}
	for name, value := range more {
		given[name] = value
	}
	return given
}

func asBinary(values []float32) []float32 {
	raw, err := binary.Append(nil, binary.LittleEndian, values)
	check(err)
	head := object{
		"inputs":     []object{input(values, object{"parameters": object{"binary_data_size": len(raw)}})},
		"parameters": object{"binary_data_output": true},
	}
	_, _, answer := infer("echo-FP32", head, raw)
	got := make([]float32, len(answer)/4)
	_, err = binary.Decode(answer, binary.LittleEndian, got)
	check(err)
	return got
}

func asJSON(values []float32) any {
	_, answer, _ := infer("echo-FP32", object{"inputs": []object{input(values, object{"data": values})}}, nil)
	return answer["outputs"].([]any)[0].(object)["data"]
}

func main() {
	few, large, long := []float32{1.5, -2}, make([]float32, largeCount), make([]float32, 3000)
	for place := range large {
		large[place] = float32(place)
	}
	report := object{"binary": asBinary(few), "json": asJSON(few), "large": slices.Equal(asBinary(large), large)}
	// Long answers of JSON come compressed, because net/http asks for it.
	report["long"] = len(asJSON(long).([]any))
	status, failed, _ := infer("nobody", object{"inputs": []object{}}, nil)
	report["error"] = []any{status, failed["error"]}
	report["connections"] = opened.Load()
	answers := make([]float32, concurrent)
	var calls sync.WaitGroup
	for tag := range answers {
		calls.Add(1)
		go func() {
			defer calls.Done()
			answers[tag] = asBinary([]float32{float32(tag)})[0]
		}()
	}
	calls.Wait()
	report["concurrent"] = answers
	check(json.NewEncoder(os.Stdout).Encode(report))
}
