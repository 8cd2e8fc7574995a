// Package seed is for the tests of packages with property tests: where it is imported, and the environment variable NODEPROXY_SEED is set,
// these draw the examples of that seed, and the same ones each time, so that the verdict of a run does not depend on chance. A flag
// -rapid.seed goes before it.
package seed

import (
	"flag"
	"fmt"
	"os"

	_ "pgregory.net/rapid" // It has the flag.
)

func init() {
	if s := os.Getenv("NODEPROXY_SEED"); s != "" {
		if err := flag.Set("rapid.seed", s); err != nil {
			panic(fmt.Sprintf("NODEPROXY_SEED: %v", err))
		}
	}
}
