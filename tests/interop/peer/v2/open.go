package main

import (
	"fmt"
	"net/url"
	"strconv"
	"strings"

	"github.com/RichardKnop/machinery/v2"
	amqpbackend "github.com/RichardKnop/machinery/v2/backends/amqp"
	backends "github.com/RichardKnop/machinery/v2/backends/iface"
	memcachebackend "github.com/RichardKnop/machinery/v2/backends/memcache"
	mongobackend "github.com/RichardKnop/machinery/v2/backends/mongo"
	redisbackend "github.com/RichardKnop/machinery/v2/backends/redis"
	amqpbroker "github.com/RichardKnop/machinery/v2/brokers/amqp"
	eagerbroker "github.com/RichardKnop/machinery/v2/brokers/eager"
	brokers "github.com/RichardKnop/machinery/v2/brokers/iface"
	redisbroker "github.com/RichardKnop/machinery/v2/brokers/redis"
	"github.com/RichardKnop/machinery/v2/config"
	eagerlock "github.com/RichardKnop/machinery/v2/locks/eager"
	locks "github.com/RichardKnop/machinery/v2/locks/iface"
	redislock "github.com/RichardKnop/machinery/v2/locks/redis"
)

// open makes the server from its URLs, which version 2 leaves to the program.
func open(cnf *config.Config) (*machinery.Server, error) {
	broker, err := openBroker(cnf)
	if err != nil {
		return nil, err
	}
	backend, err := openBackend(cnf)
	if err != nil {
		return nil, err
	}
	var lock locks.Lock = eagerlock.New()
	if cnf.Lock != "" {
		host, db, err := redisParts(cnf.Lock)
		if err != nil {
			return nil, err
		}
		lock = redislock.New(cnf, []string{host}, db, 3)
	}
	return machinery.NewServer(cnf, broker, backend, lock), nil
}

func openBroker(cnf *config.Config) (brokers.Broker, error) {
	switch scheme(cnf.Broker) {
	case "redis":
		host, db, err := redisParts(cnf.Broker)
		return redisbroker.New(cnf, host, "", "", "", db), err
	case "amqp":
		return amqpbroker.New(cnf), nil
	case "eager":
		return eagerbroker.New(), nil
	}
	return nil, fmt.Errorf("no broker for %q", scheme(cnf.Broker))
}

func openBackend(cnf *config.Config) (backends.Backend, error) {
	switch scheme(cnf.ResultBackend) {
	case "redis":
		host, db, err := redisParts(cnf.ResultBackend)
		return redisbackend.New(cnf, host, "", "", "", db), err
	case "amqp":
		return amqpbackend.New(cnf), nil
	case "mongodb":
		return mongobackend.New(cnf)
	case "memcache":
		return memcachebackend.New(cnf, strings.Split(strings.TrimPrefix(cnf.ResultBackend, "memcache://"), ",")), nil
	}
	return nil, fmt.Errorf("no backend for %q", scheme(cnf.ResultBackend))
}

func scheme(address string) string {
	before, _, _ := strings.Cut(address, ":")
	return before
}

func redisParts(address string) (string, int, error) {
	parsed, err := url.Parse(address)
	if err != nil {
		return "", 0, err
	}
	db := 0
	if path := strings.Trim(parsed.Path, "/"); path != "" {
		db, err = strconv.Atoi(path)
	}
	return parsed.Host, db, err
}
