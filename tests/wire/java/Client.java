import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.reflect.TypeToken;
import com.google.protobuf.ByteString;
import inference.GRPCInferenceServiceGrpc;
import inference.GRPCInferenceServiceGrpc.GRPCInferenceServiceBlockingStub;
import inference.GRPCInferenceServiceGrpc.GRPCInferenceServiceFutureStub;
import inference.GRPCInferenceServiceGrpc.GRPCInferenceServiceStub;
import inference.Inference.InferParameter;
import inference.Inference.ModelInferRequest;
import inference.Inference.ModelInferRequest.InferInputTensor;
import inference.Inference.ModelInferResponse;
import inference.Inference.ModelMetadataRequest;
import inference.Inference.ModelMetadataResponse;
import inference.Inference.ModelReadyRequest;
import inference.Inference.ModelStreamInferResponse;
import inference.Inference.ServerLiveRequest;
import inference.Inference.ServerMetadataRequest;
import inference.Inference.ServerMetadataResponse;
import inference.Inference.ServerReadyRequest;
import io.grpc.Context;
import io.grpc.Context.CancellableContext;
import io.grpc.ManagedChannel;
import io.grpc.Status;
import io.grpc.netty.shaded.io.grpc.netty.NettyChannelBuilder;
import io.grpc.stub.StreamObserver;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeSet;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;

/**
 * A client in Java with generated code. {@code Client ADDRESS} makes the calls that
 * test_generated_clients.py lists, with the tensors on stdin, and prints a JSON report.
 */
public final class Client {
  private static final long WAIT_SECONDS = 60; // for what must come
  private static final long SLOW = 24_000; // the probe's work: some seconds
  private static final int STREAMED = 200;
  private static final int BAD = 11; // the place of the request in the stream that fails
  private static final int CONCURRENT = 100;
  private static final int LARGE = 2_000_000; // elements of FP32: above gRPC's default limit of 4 MiB

  private final ManagedChannel channel;

  private Client(ManagedChannel channel) {
    this.channel = channel;
  }

  public static void main(String[] arguments) throws Exception {
    Map<String, List<String>> tensors =
        new Gson()
            .fromJson(
                new InputStreamReader(System.in, StandardCharsets.UTF_8),
                new TypeToken<Map<String, List<String>>>() {}.getType());
    ManagedChannel channel =
        NettyChannelBuilder.forTarget(arguments[0]).usePlaintext().maxInboundMessageSize(64 << 20).build();
    Map<String, Object> report = new Client(channel).report(tensors);
    channel.shutdownNow().awaitTermination(WAIT_SECONDS, TimeUnit.SECONDS);
    new PrintStream(System.out, true, StandardCharsets.UTF_8)
        .println(new GsonBuilder().disableHtmlEscaping().create().toJson(report));
  }

  private Map<String, Object> report(Map<String, List<String>> tensors) throws Exception {
    Map<String, Object> raw = new LinkedHashMap<>();
    Map<String, Object> typed = new LinkedHashMap<>();
    tensors.forEach(
        (datatype, texts) -> {
          raw.put(datatype, echoRaw(datatype, texts));
          if (Tensors.hasContents(datatype)) {
            typed.put(datatype, echoTyped(datatype, texts));
          }
        });
    Map<String, Object> report = described();
    report.put("raw", raw);
    report.put("typed", typed);
    report.put("parameters", parameters());
    report.put("gzip", first(stub().withCompression("gzip").modelInfer(probe(7, 0, 0))));
    report.put("large", large());
    report.put("concurrent", concurrent());
    report.put("stream", stream());
    report.put("errors", failures());
    report.put("after", first(stub().modelInfer(probe(8, 0, 0))));
    return report;
  }

  private GRPCInferenceServiceBlockingStub stub() {
    return GRPCInferenceServiceGrpc.newBlockingStub(channel).withDeadlineAfter(WAIT_SECONDS, TimeUnit.SECONDS);
  }

  private GRPCInferenceServiceFutureStub futures() {
    return GRPCInferenceServiceGrpc.newFutureStub(channel).withDeadlineAfter(WAIT_SECONDS, TimeUnit.SECONDS);
  }

  private GRPCInferenceServiceStub streams() {
    return GRPCInferenceServiceGrpc.newStub(channel).withDeadlineAfter(WAIT_SECONDS, TimeUnit.SECONDS);
  }

  /** Health and metadata of the server and of a model. */
  private Map<String, Object> described() {
    ServerMetadataResponse server = stub().serverMetadata(ServerMetadataRequest.getDefaultInstance());
    ModelMetadataResponse model =
        stub().modelMetadata(ModelMetadataRequest.newBuilder().setName("probe").build());
    Map<String, Object> described = new LinkedHashMap<>();
    described.put("live", stub().serverLive(ServerLiveRequest.getDefaultInstance()).getLive());
    described.put("ready", stub().serverReady(ServerReadyRequest.getDefaultInstance()).getReady());
    described.put("server", Map.of("name", server.getName(), "extensions", server.getExtensionsList()));
    described.put("model_ready", Map.of("probe", ready("probe"), "nobody", ready("nobody")));
    described.put(
        "metadata",
        Map.of(
            "name", model.getName(),
            "versions", model.getVersionsList(),
            "platform", model.getPlatform(),
            "inputs", signature(model.getInputsList()),
            "outputs", signature(model.getOutputsList())));
    return described;
  }

  private boolean ready(String name) {
    return stub().modelReady(ModelReadyRequest.newBuilder().setName(name).build()).getReady();
  }

  private static List<Object> signature(List<ModelMetadataResponse.TensorMetadata> tensors) {
    List<Object> described = new ArrayList<>();
    tensors.forEach(tensor -> described.add(List.of(tensor.getName(), tensor.getDatatype(), tensor.getShapeList())));
    return described;
  }

  /** A request to the probe model: y = 2 tag + index, after {@code work}. */
  private static ModelInferRequest probe(float tag, long index, long work) {
    return ModelInferRequest.newBuilder()
        .setModelName("probe")
        .addInputs(input("x", "FP32", 1, 4))
        .addInputs(input("index", "INT64", 1))
        .addInputs(input("work", "INT64", 1))
        .addRawInputContents(Tensors.encode("FP32", Collections.nCopies(4, String.valueOf(tag))))
        .addRawInputContents(Tensors.encode("INT64", List.of(String.valueOf(index))))
        .addRawInputContents(Tensors.encode("INT64", List.of(String.valueOf(work))))
        .build();
  }

  private static InferInputTensor.Builder input(String name, String datatype, long... shape) {
    InferInputTensor.Builder input = InferInputTensor.newBuilder().setName(name).setDatatype(datatype);
    for (long dimension : shape) {
      input.addShape(dimension);
    }
    return input;
  }

  private static float first(ModelInferResponse response) {
    return Float.parseFloat(Tensors.decode("FP32", response.getRawOutputContents(0)).get(0));
  }

  private static ModelInferRequest.Builder echo(String datatype) {
    return ModelInferRequest.newBuilder().setModelName("echo-" + datatype);
  }

  private List<String> echoRaw(String datatype, List<String> texts) {
    ModelInferRequest request =
        echo(datatype)
            .addInputs(input("x", datatype, 2, texts.size() / 2))
            .addRawInputContents(Tensors.encode(datatype, texts))
            .build();
    return Tensors.decode(datatype, stub().modelInfer(request).getRawOutputContents(0));
  }

  private List<String> echoTyped(String datatype, List<String> texts) {
    InferInputTensor.Builder input = input("x", datatype, 2, texts.size() / 2);
    ModelInferRequest request =
        echo(datatype).addInputs(input.setContents(Tensors.toContents(datatype, texts))).build();
    return Tensors.fromContents(datatype, stub().modelInfer(request).getOutputs(0).getContents());
  }

  /** The names of the parameters that describe a batch, and one of the values. */
  private Map<String, Object> parameters() {
    ModelInferRequest request =
        probe(1, 0, 0).toBuilder()
            .putParameters("explain", InferParameter.newBuilder().setBoolParam(true).build())
            .build();
    Map<String, InferParameter> said = stub().modelInfer(request).getParametersMap();
    return Map.of("names", new TreeSet<>(said.keySet()), "batch_rows", said.get("batch_rows").getInt64Param());
  }

  private boolean large() {
    byte[] sent = new byte[4 * LARGE];
    for (int place = 0; place < sent.length; place++) {
      sent[place] = (byte) (place % 113);
    }
    ModelInferRequest request =
        echo("FP32").addInputs(input("x", "FP32", 1, LARGE)).addRawInputContents(ByteString.copyFrom(sent)).build();
    return stub().modelInfer(request).getRawOutputContents(0).equals(ByteString.copyFrom(sent));
  }

  private List<Float> concurrent() throws Exception {
    List<Future<ModelInferResponse>> calls = new ArrayList<>();
    for (int tag = 0; tag < CONCURRENT; tag++) {
      calls.add(futures().modelInfer(probe(tag, 0, 0)));
    }
    List<Float> answers = new ArrayList<>();
    for (Future<ModelInferResponse> call : calls) {
      answers.add(first(call.get()));
    }
    return answers;
  }

  private List<Object> stream() throws Exception {
    List<Object> answers = new ArrayList<>();
    CompletableFuture<Void> end = new CompletableFuture<>();
    StreamObserver<ModelInferRequest> requests =
        streams()
            .modelStreamInfer(
                new Answers(end) {
                  @Override
                  public void onNext(ModelStreamInferResponse response) {
                    String error = response.getErrorMessage();
                    ModelInferResponse answer = response.getInferResponse();
                    answers.add(
                        Map.of("id", answer.getId(), "y", error.isEmpty() ? first(answer) : 0, "error", error));
                  }
                });
    for (int place = 0; place < STREAMED; place++) {
      requests.onNext(probe(place, place == BAD ? 99 : 0, 0).toBuilder().setId("r" + place).build());
    }
    requests.onCompleted();
    end.get();
    return answers;
  }

  private Map<String, Object> failures() throws Exception {
    ModelInferRequest.Builder misshapen = probe(1, 0, 0).toBuilder();
    misshapen.setInputs(0, input("x", "FP32", 4));
    ModelInferRequest half =
        echo("FP16")
            .addInputs(input("x", "FP16", 1, 1).setContents(Tensors.toContents("FP32", List.of("1"))))
            .build();
    Map<String, Object> failures = new LinkedHashMap<>();
    failures.put("shape", failure(stub(), misshapen.build()));
    failures.put("half", failure(stub(), half));
    failures.put("nobody", failure(stub(), probe(1, 0, 0).toBuilder().setModelName("nobody").build()));
    failures.put("raised", failure(stub(), probe(1, 99, 0)));
    failures.put("deadline", failure(stub().withDeadlineAfter(100, TimeUnit.MILLISECONDS), probe(1, 0, SLOW)));
    failures.put("cancelled", cancelled());
    failures.put("stream_cancelled", streamCancelled());
    return failures;
  }

  private static Map<String, Object> failure(GRPCInferenceServiceBlockingStub stub, ModelInferRequest request) {
    try {
      stub.modelInfer(request);
    } catch (RuntimeException error) {
      return failure(error);
    }
    return Map.of("code", 0, "message", "");
  }

  private static Map<String, Object> failure(Throwable error) {
    Status status = Status.fromThrowable(error);
    return Map.of("code", status.getCode().value(), "message", String.valueOf(status.getDescription()));
  }

  private Map<String, Object> cancelled() throws Exception {
    ScheduledExecutorService later = Executors.newSingleThreadScheduledExecutor();
    try (CancellableContext context = Context.current().withCancellation()) {
      later.schedule(() -> context.cancel(null), 50, TimeUnit.MILLISECONDS);
      return context.call(() -> failure(stub(), probe(1, 0, SLOW)));
    } finally {
      later.shutdown();
    }
  }

  private Map<String, Object> streamCancelled() throws Exception {
    CompletableFuture<Void> end = new CompletableFuture<>();
    CountDownLatch answered = new CountDownLatch(1);
    try (CancellableContext context = Context.current().withCancellation()) {
      context.call(
          () -> {
            StreamObserver<ModelInferRequest> requests =
                streams()
                    .modelStreamInfer(
                        new Answers(end) {
                          @Override
                          public void onNext(ModelStreamInferResponse response) {
                            answered.countDown();
                          }
                        });
            requests.onNext(probe(1, 0, 0));
            answered.await(WAIT_SECONDS, TimeUnit.SECONDS);
            requests.onNext(probe(1, 0, SLOW));
            return context.cancel(null);
          });
      return end.handle((none, error) -> error == null ? null : failure(error)).get();
    }
  }

  /** Completes a future with the end of a stream. */
  private abstract static class Answers implements StreamObserver<ModelStreamInferResponse> {
    private final CompletableFuture<Void> end;

    Answers(CompletableFuture<Void> end) {
      this.end = end;
    }

    @Override
    public void onError(Throwable error) {
      end.completeExceptionally(error);
    }

    @Override
    public void onCompleted() {
      end.complete(null);
    }
  }
}
