// The Go half of the interop tests: a real Go Machinery that does what it is told, a JSON line at a time.
//
//	peer -broker URL -backend URL [-lock URL] [-queue NAME] [-expire SECONDS]
//
// Each line on standard input is {"id": n, "op": "...", ...}; each answer on standard output is {"id": n, "ok": ...} or
// {"id": n, "error": "..."}. Requests run side by side; a long one does not hold up the next.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	stdlog "log"
	"os"
	"sync"

	"github.com/RichardKnop/machinery/v1/config"
	"github.com/RichardKnop/machinery/v1/log"
)

type request struct {
	ID int    `json:"id"`
	Op string `json:"op"`
	orders
}

type answer struct {
	ID    int         `json:"id"`
	OK    interface{} `json:"ok"`
	Error string      `json:"error,omitempty"`
}

func main() {
	cnf := &config.Config{
		AMQP: &config.AMQPConfig{},
		Redis: &config.RedisConfig{
			MaxIdle: 100, IdleTimeout: 240, NormalTasksPollPeriod: 100, DelayedTasksPollPeriod: 20,
		},
		NoUnixSignals: true,
	}
	flag.StringVar(&cnf.Broker, "broker", "eager", "")
	flag.StringVar(&cnf.ResultBackend, "backend", "eager", "")
	flag.StringVar(&cnf.Lock, "lock", "", "")
	flag.StringVar(&cnf.DefaultQueue, "queue", "machinery_tasks", "")
	flag.IntVar(&cnf.ResultsExpireIn, "expire", 3600, "")
	flag.StringVar(&cnf.AMQP.Exchange, "exchange", "machinery_exchange", "")
	flag.StringVar(&cnf.AMQP.ExchangeType, "exchange-type", "direct", "")
	flag.StringVar(&cnf.AMQP.BindingKey, "binding-key", "machinery_task", "")
	flag.IntVar(&cnf.AMQP.PrefetchCount, "prefetch", 3, "")
	loud := flag.Bool("loud", false, "log to standard error")
	drain := flag.Int("drain", 0, "be a worker with so many slots, and nothing else")
	flag.Parse()

	if *loud {
		log.Set(stdlog.New(os.Stderr, "", 0))
	} else {
		log.Set(stdlog.New(io.Discard, "", 0))
	}
	server, err := open(cnf)
	if err != nil {
		fmt.Fprintln(os.Stderr, "peer:", err)
		os.Exit(2)
	}
	p := &peer{server: server, cnf: cnf}
	if *drain > 0 {
		if err = server.RegisterTasks(taskTable()); err == nil {
			err = server.NewWorker("drain", *drain).Launch()
		}
		fmt.Fprintln(os.Stderr, "peer:", err)
		os.Exit(1)
	}
	serve(p)
}

func serve(p *peer) {
	var writing sync.Mutex
	write := func(a answer) {
		text, err := json.Marshal(a)
		if err != nil {
			text, _ = json.Marshal(answer{ID: a.ID, Error: "the answer cannot be written: " + err.Error()})
		}
		writing.Lock()
		defer writing.Unlock()
		os.Stdout.Write(append(text, '\n'))
	}
	write(answer{ID: 0, OK: "ready"})
	reader := bufio.NewReaderSize(os.Stdin, 1<<20)
	for {
		line, err := reader.ReadBytes('\n')
		if err != nil {
			return
		}
		var order request
		if err := json.Unmarshal(line, &order); err != nil {
			write(answer{Error: "no request: " + err.Error()})
			continue
		}
		go func() {
			ok, err := p.obey(order.Op, order.orders)
			if err != nil {
				write(answer{ID: order.ID, Error: err.Error()})
				return
			}
			write(answer{ID: order.ID, OK: ok})
		}()
	}
}
