package main

import (
	"github.com/RichardKnop/machinery/v1"
	"github.com/RichardKnop/machinery/v1/config"
)

// open makes the server from its URLs. This file is of version 1; v2/open.go stands in its place for version 2, and in the
// other files the import paths are changed.
func open(cnf *config.Config) (*machinery.Server, error) { return machinery.NewServer(cnf) }
