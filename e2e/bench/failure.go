package main

import (
	"fmt"
	"strings"
)

// failure is what a step that fails panics with: it ends the run, or the part of it that is an attempt.
type failure struct{ err error }

// check fails with an error, if there is one, and with what it is about.
func check(err error, about ...string) {
	if err != nil && len(about) > 0 {
		err = fmt.Errorf("%s: %w", strings.Join(about, ": "), err)
	}
	if err != nil {
		panic(failure{err})
	}
}

// must returns a value that was got without an error.
func must[T any](value T, err error) T {
	check(err)
	return value
}

// attempt returns the error with which fn fails.
func attempt(fn func()) (err error) {
	defer func() { err = caught(recover()) }()
	fn()
	return nil
}

// caught is the error of what was recovered.
func caught(recovered any) error {
	f, ok := recovered.(failure)
	if recovered != nil && !ok {
		panic(recovered)
	}
	return f.err
}
