package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"sync"
	"time"

	"github.com/RichardKnop/machinery/v1"
	"github.com/RichardKnop/machinery/v1/backends/result"
	"github.com/RichardKnop/machinery/v1/config"
	"github.com/RichardKnop/machinery/v1/tasks"
)

// What a request may carry. Messages are Go Machinery's own JSON, as raw text, so that numbers keep their digits.
type orders struct {
	Message     json.RawMessage   `json:"message"`
	Messages    []json.RawMessage `json:"messages"`
	Callback    json.RawMessage   `json:"callback"`
	Typed       []typedArg        `json:"typed"`
	UUID        string            `json:"uuid"`
	UUIDs       []string          `json:"uuids"`
	Group       string            `json:"group"`
	Queue       string            `json:"queue"`
	Name        string            `json:"name"`
	Spec        string            `json:"spec"`
	Count       int               `json:"count"`
	Start       int64             `json:"start"`
	Seed        int64             `json:"seed"`
	Concurrency int               `json:"concurrency"`
	Timeout     float64           `json:"timeout"` // seconds
}

type peer struct {
	server *machinery.Server
	cnf    *config.Config
	mutex  sync.Mutex
	worker *machinery.Worker
	ended  chan error
}

func (p *peer) obey(op string, o orders) (interface{}, error) {
	switch op {
	case "send":
		return p.send(o)
	case "send_many":
		return p.sendMany(o)
	case "send_numbers":
		return p.sendNumbers(o)
	case "latency":
		return p.latency(o)
	case "chain":
		return p.chain(o)
	case "group":
		return p.group(o)
	case "chord":
		return p.chord(o)
	case "result":
		return p.result(o)
	case "state":
		return p.server.GetBackend().GetState(o.UUID)
	case "group_states":
		return p.server.GetBackend().GroupTaskStates(o.Group, o.Count)
	case "pending":
		return p.server.GetBroker().GetPendingTasks(o.Queue)
	case "delayed":
		return p.server.GetBroker().GetDelayedTasks()
	case "worker":
		return p.work(o)
	case "quit":
		return p.quit(o)
	case "periodic":
		return p.periodic(o)
	case "trigger_chord":
		return p.server.GetBackend().TriggerChord(o.Group)
	case "decode":
		return decodeAll(o.Messages)
	case "fuzz":
		return fuzz(o.Seed, o.Count)
	}
	return nil, fmt.Errorf("unknown op %q", op)
}

// signature reads a message as Go's brokers do.
func signature(message json.RawMessage) (*tasks.Signature, error) {
	found := new(tasks.Signature)
	decoder := json.NewDecoder(bytes.NewReader(message))
	decoder.UseNumber()
	return found, decoder.Decode(found)
}

func signatures(messages []json.RawMessage) ([]*tasks.Signature, error) {
	found := make([]*tasks.Signature, len(messages))
	for i, message := range messages {
		one, err := signature(message)
		if err != nil {
			return nil, err
		}
		found[i] = one
	}
	return found, nil
}

func (p *peer) send(o orders) (interface{}, error) {
	one, err := signature(o.Message)
	if err != nil {
		return nil, err
	}
	if o.Typed != nil {
		if one.Args, err = typedArgs(o.Typed); err != nil {
			return nil, err
		}
	}
	sent, err := p.server.SendTask(one)
	if err != nil {
		return nil, err
	}
	return sent.Signature.UUID, nil
}

func (p *peer) sendMany(o orders) (interface{}, error) {
	many, err := signatures(o.Messages)
	if err != nil {
		return nil, err
	}
	uuids := []string{}
	for i := 0; i < max(1, o.Count); i++ {
		for _, one := range many {
			sent, err := p.server.SendTask(tasks.CopySignature(one))
			if err != nil {
				return nil, err
			}
			uuids = append(uuids, sent.Signature.UUID)
		}
	}
	return uuids, nil
}

// sendNumbers sends echo_int64 for the numbers from `start` on, one after the other.
func (p *peer) sendNumbers(o orders) (interface{}, error) {
	uuids := make([]string, o.Count)
	for i := range uuids {
		sent, err := p.server.SendTask(numbered(o.Start + int64(i)))
		if err != nil {
			return nil, err
		}
		uuids[i] = sent.Signature.UUID
	}
	return uuids, nil
}

func numbered(number int64) *tasks.Signature {
	return &tasks.Signature{Name: "echo_int64", Args: []tasks.Arg{{Type: "int64", Value: number}}}
}

// latency calls for one number after the other, and says how many seconds each took from sending to result.
func (p *peer) latency(o orders) (interface{}, error) {
	taken := make([]float64, o.Count)
	for i := range taken {
		began := time.Now()
		sent, err := p.server.SendTask(numbered(int64(i)))
		if err != nil {
			return nil, err
		}
		if _, err = sent.GetWithTimeout(seconds(o.Timeout), 200*time.Microsecond); err != nil {
			return nil, err
		}
		taken[i] = time.Since(began).Seconds()
	}
	return taken, nil
}

func (p *peer) chain(o orders) (interface{}, error) {
	many, err := signatures(o.Messages)
	if err != nil {
		return nil, err
	}
	chain, err := tasks.NewChain(many...)
	if err != nil {
		return nil, err
	}
	if _, err = p.server.SendChain(chain); err != nil {
		return nil, err
	}
	return uuidsOf(chain.Tasks), nil
}

func (p *peer) group(o orders) (interface{}, error) {
	group, err := newGroup(o)
	if err != nil {
		return nil, err
	}
	if _, err = p.server.SendGroup(group, o.Concurrency); err != nil {
		return nil, err
	}
	return map[string]interface{}{"group": group.GroupUUID, "members": group.GetUUIDs()}, nil
}

func (p *peer) chord(o orders) (interface{}, error) {
	group, err := newGroup(o)
	if err != nil {
		return nil, err
	}
	callback, err := signature(o.Callback)
	if err != nil {
		return nil, err
	}
	chord, err := tasks.NewChord(group, callback)
	if err != nil {
		return nil, err
	}
	if _, err = p.server.SendChord(chord, o.Concurrency); err != nil {
		return nil, err
	}
	return map[string]interface{}{
		"group": group.GroupUUID, "members": group.GetUUIDs(), "callback": chord.Callback.UUID,
	}, nil
}

func newGroup(o orders) (*tasks.Group, error) {
	many, err := signatures(o.Messages)
	if err != nil {
		return nil, err
	}
	return tasks.NewGroup(many...)
}

func uuidsOf(many []*tasks.Signature) []string {
	uuids := []string{}
	for _, one := range many {
		uuids = append(uuids, one.UUID)
	}
	return uuids
}

// result waits as a Go program does, and says each value with its Go type.
func (p *peer) result(o orders) (interface{}, error) {
	waiting := result.NewAsyncResult(&tasks.Signature{UUID: o.UUID}, p.server.GetBackend())
	values, err := waiting.GetWithTimeout(seconds(o.Timeout), 5*time.Millisecond)
	if err != nil {
		return nil, err
	}
	return described(values), nil
}

func described(values []reflect.Value) []interface{} {
	found := []interface{}{}
	for _, value := range values {
		found = append(found, map[string]interface{}{"type": value.Type().String(), "value": plain(value.Interface())})
	}
	return found
}

func (p *peer) work(o orders) (interface{}, error) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if p.worker != nil {
		return nil, errors.New("a worker runs already")
	}
	if err := p.server.RegisterTasks(taskTable()); err != nil {
		return nil, err
	}
	if o.Queue != "" {
		p.worker = p.server.NewCustomQueueWorker("peer", o.Concurrency, o.Queue)
	} else {
		p.worker = p.server.NewWorker("peer", o.Concurrency)
	}
	p.ended = make(chan error, 1)
	p.worker.LaunchAsync(p.ended)
	return "working", nil
}

func (p *peer) quit(o orders) (interface{}, error) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if p.worker == nil {
		return "idle", nil
	}
	p.worker.Quit()
	p.worker = nil
	return "stopped", nil
}

func (p *peer) periodic(o orders) (interface{}, error) {
	one, err := signature(o.Message)
	if err != nil {
		return nil, err
	}
	return "registered", p.server.RegisterPeriodicTask(o.Spec, o.Name, one)
}

func seconds(length float64) time.Duration { return time.Duration(length * float64(time.Second)) }
