package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/RichardKnop/machinery/v1/tasks"
)

// taskTable names the tasks of the Go worker. Those that both languages have mean the same in tests/interop/fleet.py.
func taskTable() map[string]interface{} {
	var mutex sync.Mutex
	failures := map[string]int{}

	table := map[string]interface{}{
		"add":     func(a, b int64) (int64, error) { return a + b, nil },
		"mul":     func(a, b int64) (int64, error) { return a * b, nil },
		"total":   func(parts ...int64) (int64, error) { return sum(parts), nil },
		"pair":    func(a int64, b string) (int64, string, error) { return a + 1, b + "!", nil },
		"none":    func() error { return nil },
		"where":   func() (string, error) { return "go", nil },
		"go_only": func(text string) (string, error) { return "go:" + text, nil },
		"hold":    func() (string, error) { select {} }, // until the process is killed
		"fail":    func(text string) error { return errors.New(text) },
		"crash":   func(text string) error { panic(text) },
		"caught":  func(text string) (string, error) { return "go caught " + text, nil },
		"caught_with": func(text string, more string) (string, error) {
			return "go caught " + text + " with " + more, nil
		},
		// flaky fails for its first `times` runs of this process, by key.
		"flaky": func(key string, times int64) (int64, error) {
			mutex.Lock()
			defer mutex.Unlock()
			failures[key]++
			if failures[key] <= int(times) {
				return 0, fmt.Errorf("failure %d", failures[key])
			}
			return int64(failures[key]), nil
		},
		// later asks to be run again after some milliseconds, once.
		"later": func(key string, milliseconds int64) (string, error) {
			mutex.Lock()
			defer mutex.Unlock()
			failures[key]++
			if failures[key] == 1 {
				return "", tasks.NewErrRetryTaskLater("not yet", time.Duration(milliseconds)*time.Millisecond)
			}
			return "go at last", nil
		},
		"header": func(ctx context.Context, key string) (string, error) {
			value, _ := tasks.SignatureFromContext(ctx).Headers[key].(string)
			return value, nil
		},
	}
	for name, function := range echoes {
		table["echo_"+name] = function
	}
	return table
}

func sum(parts []int64) int64 {
	total := int64(0)
	for _, part := range parts {
		total += part
	}
	return total
}

func echo[T any](value T) (T, error) { return value, nil }

// echoes has a task for each type that an argument may have.
var echoes = map[string]interface{}{
	"bool": echo[bool], "string": echo[string],
	"int": echo[int], "int8": echo[int8], "int16": echo[int16], "int32": echo[int32], "int64": echo[int64],
	"uint": echo[uint], "uint8": echo[uint8], "uint16": echo[uint16], "uint32": echo[uint32], "uint64": echo[uint64],
	"float32": echo[float32], "float64": echo[float64],
	"[]bool": echo[[]bool], "[]string": echo[[]string],
	"[]int": echo[[]int], "[]int8": echo[[]int8], "[]int16": echo[[]int16], "[]int32": echo[[]int32],
	"[]int64": echo[[]int64], "[]uint": echo[[]uint], "[]uint8": echo[[]uint8], "[]byte": echo[[]byte],
	"[]uint16": echo[[]uint16], "[]uint32": echo[[]uint32], "[]uint64": echo[[]uint64],
	"[]float32": echo[[]float32], "[]float64": echo[[]float64],
}
