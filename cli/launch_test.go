package cli

import (
	"context"
	"errors"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"
)

func TestLaunchArguments(t *testing.T) {
	c, err := parseLaunch([]string{"m", "--prefill-devices", "0+1,2+3", "--decode-devices=4,5", "--prefill-ports", "1,2", "--decode-ports", "7", "--port", "9",
		"--connector-config", `{"transport":"tcp"}`, "--timeout", "3m", "--max-requests", "11", "--max-body", "12", "--body-memory", "9000000", "--bench", "--bench-args", "--num-prompts 5", "--", "--port-like", "--", "x"})
	if err != nil {
		t.Fatal(err)
	}
	if c.Model != "m" || !reflect.DeepEqual(c.PrefillDevices, []string{"0,1", "2,3"}) || !reflect.DeepEqual(c.DecodeDevices, []string{"4", "5"}) ||
		!reflect.DeepEqual(c.PrefillPorts, []int{1, 2}) || !reflect.DeepEqual(c.DecodePorts, []int{7}) || c.Port != 9 || c.ConnectorConfig["transport"] != "tcp" ||
		c.Ready != 3*time.Minute || c.MaxRequests != 11 || c.MaxBody != 12 || c.BodyMemory != 9000000 || !c.Bench || !reflect.DeepEqual(c.BenchArgs, []string{"--num-prompts", "5"}) || !reflect.DeepEqual(c.Args, []string{"--port-like", "--", "x"}) {
		t.Errorf("%+v", c)
	}
	if c, err := parseLaunch([]string{"--prefill", "2", "m"}); err != nil || c.Model != "m" || c.Prefill != 2 {
		t.Errorf("the model behind the options: %+v, %v", c, err)
	}
	for _, bad := range []string{"m n", "m --nope", "m --port x", "m --prefill-ports 1,x", "m --connector-config [", "m --connector-config 7", "m --failure-policy no", "m --timeout 0s"} {
		if _, err := parseLaunch(strings.Fields(bad)); !errors.Is(err, errUsage) {
			t.Errorf("%s: %v, want an error of usage", bad, err)
		}
	}
	if err := runLaunch(context.Background(), []string{"m", "--vllm", "vllm-of-nobody"}, os.Stdout); err == nil {
		t.Error("a program that is not there is accepted")
	}
}
